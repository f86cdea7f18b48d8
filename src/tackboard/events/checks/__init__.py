"""What is wrong with a snapshot, what is in it, and how far two snapshots lie apart."""
