"""`tackboard …`: one module per command, thin; what a command needs is imported when it runs."""
