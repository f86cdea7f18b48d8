"""Removes users who asked to be forgotten, and events that are too old."""
