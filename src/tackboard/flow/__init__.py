"""Pipelines: jobs of several commands that a user could also type. The result of each step is read from disk."""
