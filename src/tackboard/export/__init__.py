"""Checkpoint in, bundle out."""
