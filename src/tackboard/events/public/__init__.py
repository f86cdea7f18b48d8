"""Public datasets as their publishers ship them: reads files that a user downloaded, and writes datasets."""
