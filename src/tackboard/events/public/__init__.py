"""Public datasets as their publishers ship them: files that a user downloaded in, datasets out."""
