"""Synthetic worlds with known ground truth: parameters in, a dataset and its exact oracle out."""
