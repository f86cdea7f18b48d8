"""The formats that are shared: a model that can be served, verifiable without torch."""
