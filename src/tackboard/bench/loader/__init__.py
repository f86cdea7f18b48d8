"""`tackboard bench loader` makes the same training batches with our loader and with rivals, checks and times them."""
