"""The format of a bundle, which is a model that can be served; a bundle can be verified without torch."""
