"""`tackboard …`: one module per noun, thin commands; what a command needs is imported when it runs."""
