"""`tackboard bench features`: the same features by our executors and by rivals, checked and timed."""
