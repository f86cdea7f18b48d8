"""`tackboard bench loader` checks and times the same training batches, made by our loader and by rivals."""
