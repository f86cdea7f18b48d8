"""Makes a bundle from a checkpoint."""
