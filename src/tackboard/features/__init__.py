"""Features defined once: a typed language and its two executors."""
