"""This package makes synthetic worlds: it computes a dataset and its exact oracle from a few parameters."""
