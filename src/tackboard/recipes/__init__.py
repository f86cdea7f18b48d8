"""Recipes. Each recipe is a function that returns the typed config of a run."""
