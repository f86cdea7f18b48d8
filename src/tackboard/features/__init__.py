"""Features are defined once, in a typed language, and computed by two executors."""
