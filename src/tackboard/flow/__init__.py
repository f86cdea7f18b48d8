"""Pipelines: whole jobs made of the commands that a user would type, each step's outcome read from disk."""
