"""The benches measure the claims that we make. Each `tackboard bench` command has one module or folder here."""
