"""This package removes users who asked to be forgotten, and events that are too old."""
