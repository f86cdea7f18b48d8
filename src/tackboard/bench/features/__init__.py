"""`tackboard bench features` compares our executors with rivals, by the values and the times of the same features."""
