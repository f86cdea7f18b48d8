"""Defines the format of a bundle, which is a model ready to be served. A bundle can be verified without torch."""
