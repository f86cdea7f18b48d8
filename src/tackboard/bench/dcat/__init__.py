"""`tackboard bench dcat` compares reading the context once per user with running each candidate through all of it."""
