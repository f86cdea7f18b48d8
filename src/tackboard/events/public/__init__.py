"""This package reads the files of public datasets that a user downloaded, and writes them as datasets."""
