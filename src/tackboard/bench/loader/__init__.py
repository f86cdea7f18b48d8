"""`tackboard bench loader` compares the training batches, the speed and the memory of our loader and of rivals."""
