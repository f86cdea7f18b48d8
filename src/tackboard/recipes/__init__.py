"""Named runs: one function per run, returning one typed config."""
