"""Checks of a snapshot for errors, statistics of its events, and measures of how far two snapshots differ."""
