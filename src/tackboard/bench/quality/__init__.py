"""`tackboard bench quality`: models on public datasets under published protocols, cell by cell."""
