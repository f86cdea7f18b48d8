"""Models are code for a single device. They declare their tables and know nothing of processes, files or servers."""
