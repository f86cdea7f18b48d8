"""`tackboard bench loader`: the same training batches by our loader and by rivals, checked and timed."""
