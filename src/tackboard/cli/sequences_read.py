"""`tackboard sequences read STORE --user U`: what a store holds of a user."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tackboard.events.sequence_store.interface import Sequences


def sequences_read(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    user: str = typer.Option(..., "--user", help="The user's id as in the log."),
    last: int | None = typer.Option(None, "--last", min=1, help="Only the newest so many."),
    since: str | None = typer.Option(None, "--since", help="Not before: ms since 1970, or ISO 8601."),
    until: str | None = typer.Option(None, "--until", help="Before: ms since 1970, or ISO 8601."),
    received_before: str | None = typer.Option(None, "--received-before", help="What a request at that time saw."),
    fields: str | None = typer.Option(None, "--fields", help="Columns, separated by commas; all by default."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object: the columns."),
) -> None:
    """Show a user's events, oldest first. A user who is not known has none."""
    from tackboard.events.privacy.forgetting import user_ids_of
    from tackboard.events.sequence_store import open_store

    names = None if fields is None else [name.strip() for name in fields.split(",") if name.strip()]
    # A log of numbers and a log of text give one word two ids; the store holds one of them.
    with open_store(store) as opened:
        found = [
            opened.read(
                user_id,
                names,
                last=last,
                since_ms=_milliseconds("--since", since),
                until_ms=_milliseconds("--until", until),
                received_before_ms=_milliseconds("--received-before", received_before),
            )
            for user_id in user_ids_of(user)
        ]
    _show(max(found, key=lambda one: one.num_events), as_json=json_output)


def _show(found: Sequences, *, as_json: bool) -> None:
    lists = {name: column.to_pylist() for name, column in found.columns.items()}
    if as_json:
        typer.echo(json.dumps({"num_events": found.num_events, "columns": lists}))
        return
    texts = {name: [name, *("" if value is None else str(value) for value in lists[name])] for name in lists}
    widths = {name: max(len(text) for text in texts[name]) for name in texts}
    for row in range(found.num_events + 1):
        typer.echo("  ".join(texts[name][row].ljust(widths[name]) for name in texts).rstrip())


def _milliseconds(option: str, text: str | None) -> int | None:
    from datetime import UTC, datetime

    from tackboard.core.errors import UsageError

    if text is None:
        return None
    try:
        if text.lstrip("-").isdigit():
            return int(text)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{option} {text!r}", allowed="allowed: ms since 1970, or ISO 8601 such as 2026-11-15T10:00:00Z"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
