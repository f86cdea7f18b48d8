"""Scores one request with a bundle, in one process."""
