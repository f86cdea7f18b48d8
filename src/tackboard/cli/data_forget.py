"""`tackboard data forget --user U`: out of the sequence stores at once, and out of every snapshot from the next on."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def data_forget(
    user: list[str] = typer.Option(..., "--user", help="A user's id as in the log, or `-`: one per line from stdin."),
    data: list[Path] = typer.Option([], "--data", help="A dataset's folder, datasets/NAME. Repeatable."),
    store: list[str] = typer.Option([], "--store", help="A sequence store's address. Repeatable."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Forget a user: remove them from stores now, and from the next snapshot of each dataset."""
    import sys

    from tackboard.core.errors import UsageError
    from tackboard.events.forgetting import dataset_folder, forget_users, user_ids_of

    names = [name for word in user for name in (sys.stdin.read().splitlines() if word == "-" else [word])]
    names = [name for name in names if name.strip()]
    if not names:
        raise UsageError("no user to forget", fix="tackboard data forget --user U --data datasets/NAME")
    if not data and not store:
        raise UsageError(
            "nothing to forget them in", fix="name datasets with --data, sequence stores with --store, or both"
        )
    folders = [dataset_folder(path) for path in data]
    # The lists first: whatever stops us after them, the next snapshot is written without these users.
    remains = forget_users(names, folders)
    ids = [user_id for name in names for user_id in user_ids_of(name)]
    num_removed = {_without_password(url): _forget_in_store(url, ids) for url in store}
    if json_output:
        answer = {
            "num_users": len(names),
            "datasets": [
                {
                    "dataset": str(folder),
                    "snapshots": [
                        {"snapshot": str(one.snapshot), "num_users": one.num_users, "num_events": one.num_events}
                        for one in found
                    ],
                }
                for folder, found in zip(folders, remains, strict=True)
            ],
            "stores": [{"store": url, "num_events_removed": removed} for url, removed in num_removed.items()],
        }
        typer.echo(json.dumps(answer))
        return
    for url, removed in num_removed.items():
        typer.echo(f"{url}: {removed:,} events removed")
    for folder, found in zip(folders, remains, strict=True):
        typer.echo(f"{folder}: {len(names)} users will be in no further snapshot")
        for one in found:
            typer.echo(f"  {one.snapshot.name} still holds {one.num_users:,} forgotten, with {one.num_events:,} events")
        if found:
            typer.echo(f"  make one without them, and remove these: tackboard data retain {folder} --prune")


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else url


def _forget_in_store(url: str, user_ids: list[int]) -> int:
    from tackboard.events.sequence_store import open_store

    opened = open_store(url)
    try:
        return sum(int(opened.forget(user_id)) for user_id in user_ids)
    finally:
        opened.close()
