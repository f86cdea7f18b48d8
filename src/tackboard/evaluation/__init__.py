"""Measures how well a model ranks the catalogue or answers labelled requests, and compares it with baselines."""
