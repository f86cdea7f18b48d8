"""This package writes the training state to disk, completely or not at all, and verifies it when it is loaded."""
