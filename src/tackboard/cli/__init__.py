"""Each module defines a command `tackboard …` or a group of commands. A command imports what it needs when it runs."""
