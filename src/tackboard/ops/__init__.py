"""Fast operations: each `<op>.py` chooses an implementation, and a plain twin proves it right."""
