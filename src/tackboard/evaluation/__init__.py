"""How good a model is: rankings of the whole catalogue, beside baselines, in one table."""
