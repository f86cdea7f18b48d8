"""All other packages use core: errors, strict config, hashing, atomic files, run directories. Core needs no torch."""
