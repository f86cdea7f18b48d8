"""`tackboard bench features` computes the same features with our executors and with rivals, checks and times them."""
