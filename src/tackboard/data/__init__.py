"""Reads a dataset on disk as numbered training batches."""
