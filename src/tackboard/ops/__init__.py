"""Contains fast operations. Tests compare each operation with a plain implementation of the same computation."""
