"""`tackboard bench pretrain` compares the time of a training step with its floor: the least time that it can take."""
