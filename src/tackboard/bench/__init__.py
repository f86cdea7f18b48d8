"""Every claim as a measurement: one module for each `tackboard bench` name."""
