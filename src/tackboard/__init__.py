"""Tackboard: logs of user activity in, recommendations out.

The folders of this package are the path of the data; docs/architecture.md draws it. Nothing is imported here, so
that `tackboard --help` stays quick and a missing optional part never breaks an unrelated command.
"""

__version__ = "0.1.0"
