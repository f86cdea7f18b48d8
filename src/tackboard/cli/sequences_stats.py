"""`tackboard sequences stats STORE`: how much a sequence store holds, and what its acknowledgements mean."""

from __future__ import annotations

import dataclasses
import json

import typer


def sequences_stats(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Count users and events, and show the settings."""
    from tackboard.events.sequence_store import open_store

    with open_store(store) as opened:
        content = {"store": store, **opened.stats(), "settings": dataclasses.asdict(opened.config)}
    if json_output:
        typer.echo(json.dumps(content))
        return
    settings = content.pop("settings")
    for name, value in {**content, **settings}.items():
        if name == "fields":
            value = ", ".join(f"{field} ({kind})" for field, kind in value.items()) or "none"
        typer.echo(f"{name:<22}{value:,}" if isinstance(value, int) else f"{name:<22}{value}")
