"""The commands `tackboard …`: one module per noun. A command imports what it needs when it runs."""
