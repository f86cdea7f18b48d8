"""The commands `tackboard …`, one module per command or group. A command imports what it needs when it runs."""
