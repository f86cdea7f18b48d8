"""This package writes the training state to disk, all or nothing, and verifies it when it is loaded."""
