"""`tackboard bench pretrain`: how fast a step of pretraining is, and how fast it could be."""
