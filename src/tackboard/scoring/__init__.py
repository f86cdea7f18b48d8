"""A bundle and one request in, scores out, in one process."""
