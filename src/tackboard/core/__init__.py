"""What every other folder stands on: errors, strict config, hashing, atomic files, run directories. No torch."""
