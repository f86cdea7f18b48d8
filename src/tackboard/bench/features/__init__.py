"""`tackboard bench features` compares values and times of features that our executors and rivals compute."""
