"""`tackboard bench features` lets our executors and rivals compute the same features, and compares values and times."""
