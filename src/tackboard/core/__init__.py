"""Holds what all other packages use: errors, strict config, hashing, atomic files, run directories. Needs no torch."""
