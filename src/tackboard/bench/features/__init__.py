"""`tackboard bench features` checks and times the same features, computed by our executors and by rivals."""
