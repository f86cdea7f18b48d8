"""`tackboard bench pretrain`: compares a training step with its floor, adding one optimisation at a time."""
