"""`tackboard bench pretrain`: a training step beside its floor, one optimisation at a time."""
