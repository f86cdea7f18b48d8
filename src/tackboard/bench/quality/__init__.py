"""`tackboard bench quality` measures models on public datasets under published protocols, cell by cell."""
