"""`tackboard sequences retain STORE --days N`: old events out of a sequence store."""

from __future__ import annotations

import json

import typer


def sequences_retain(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    days: float = typer.Option(..., "--days", help="Events that happened longer ago are deleted."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Delete events that happened more than so many days ago; readers and writers go on."""
    from tackboard.events.sequence_store import open_store

    with open_store(store) as opened:
        num_dropped = opened.retain(days)
    typer.echo(json.dumps({"store": store, "num_dropped": num_dropped}) if json_output else f"dropped {num_dropped:,}")
