"""Training takes the config of a recipe and writes a run directory with checkpoints."""
