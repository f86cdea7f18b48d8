"""`tackboard bench daily` trains a model again and again while the log goes on, and judges it on the period after."""
