"""Quality metrics that stream and merge: batches in, one number out, the same however the data was cut."""
