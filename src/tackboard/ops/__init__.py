"""Fast operations. Tests compare each operation with a plain twin that computes the same."""
