"""Named runs. Each run is one function that returns one typed config."""
