"""Training: a recipe's config in, a run directory with checkpoints out."""
