"""`tackboard bench daily` trains models period by period while a log goes on, and judges each on the period after."""
