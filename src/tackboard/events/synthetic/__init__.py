"""Synthetic worlds with known ground truth: makes a dataset and its exact oracle from a few parameters."""
