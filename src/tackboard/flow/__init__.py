"""This package runs pipelines of commands that a user could also type. It reads each step's result from disk."""
