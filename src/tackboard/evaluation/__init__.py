"""Evaluation: how well a model ranks the whole catalogue or answers labelled requests, compared with baselines."""
