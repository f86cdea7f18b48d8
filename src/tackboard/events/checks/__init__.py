"""This package checks a snapshot for errors, describes its events, and measures how far two snapshots differ."""
