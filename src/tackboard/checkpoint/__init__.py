"""Training state on disk. It is written atomically, all or nothing, and verified when it is loaded."""
