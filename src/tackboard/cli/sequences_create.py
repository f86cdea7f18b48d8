"""`tackboard sequences create STORE`: an empty sequence store with declared fields."""

from __future__ import annotations

import typer


def sequences_create(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    field: list[str] = typer.Option([], "--field", help="A field: name=int, float, bool or string. Repeatable."),
    max_events: int = typer.Option(16_000, "--max-events", min=1, help="Most events kept of a user."),
) -> None:
    """Make an empty store. `sequences append` makes one by itself from the columns of a log."""
    from tackboard.core.errors import UsageError
    from tackboard.events.sequence_store import StoreConfig, create_store

    fields = {}
    for option in field:
        name, equals, kind = option.partition("=")
        if not equals or name in fields:
            raise UsageError(f"--field {option}", allowed="allowed: name=int, float, bool or string, each name once")
        fields[name] = kind
    create_store(store, StoreConfig(fields=fields, max_events=max_events)).close()
    typer.echo(f"made {store}: at most {max_events:,} events of a user")
