"""A dataset on disk in, numbered training batches out."""
