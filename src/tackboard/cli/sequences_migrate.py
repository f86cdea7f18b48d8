"""`tackboard sequences migrate STORE`: checksums for a sequence store that an older tackboard made."""

from __future__ import annotations

import dataclasses
import json

import typer


def sequences_migrate(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Rewrite an older store with checksums. Stop its readers and writers first; killed, give the command again."""
    from tackboard.core.errors import counted
    from tackboard.events.sequence_store.codec import FORMAT_VERSION
    from tackboard.events.sequence_store.migration import migrate_store

    report = migrate_store(store)
    if json_output:
        found = {} if report is None else dataclasses.asdict(report)
        typer.echo(json.dumps({"store": store, "is_changed": report is not None, **found}))
    elif report is None:
        typer.echo(f"{store} has format version {FORMAT_VERSION} already; nothing was changed")
    else:
        held = f"{counted(report.num_users, 'user')}, {counted(report.num_events, 'event')}"
        typer.echo(f"{store} has format version {FORMAT_VERSION} now: {held}, each block with a checksum")
