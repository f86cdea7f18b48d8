"""`tackboard bench quality` measures models on public datasets under published protocols, in units called cells."""
