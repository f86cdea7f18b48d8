"""The benches, which measure every claim that we make: one module or folder for each `tackboard bench` name."""
