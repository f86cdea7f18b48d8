"""Models: single-device code that declares its tables and knows nothing of processes, files or servers."""
