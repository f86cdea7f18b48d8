"""The base of all other folders: errors, strict config, hashing, atomic files, run directories. It needs no torch."""
