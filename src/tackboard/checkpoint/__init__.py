"""Training state on disk: written atomically, verified on load, never half there."""
