"""Training in several processes: who takes part, which process holds which rows, and what is sent between them."""
