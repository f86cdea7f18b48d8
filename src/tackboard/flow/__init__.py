"""Pipelines run several commands that a user could also type. They read the result of each step from disk."""
