"""`tackboard data forget --user U`: out of the sequence stores at once, and out of every snapshot from the next on."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer


def data_forget(
    user: list[str] = typer.Option(..., "--user", help="A user's id as in the log, or `-`: one per line from stdin."),
    data: list[Path] = typer.Option([], "--data", help="A dataset's folder, datasets/NAME. Repeatable."),
    store: list[str] = typer.Option([], "--store", help="A sequence store's address. Repeatable."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Forget a user: remove them from stores now, and from the next snapshot of each dataset."""
    import sys

    from tackboard.core.errors import UsageError, counted
    from tackboard.core.progress import say
    from tackboard.events.privacy.forgetting import dataset_folder, forget_users, user_ids_of

    words = [name for word in user for name in (sys.stdin.read().splitlines() if word == "-" else [word])]
    names = list(dict.fromkeys(name.strip() for name in words if name.strip()))
    if not names:
        raise UsageError("no user to forget", fix="tackboard data forget --user U --data datasets/NAME")
    if not data and not store:
        raise UsageError(
            "nothing to forget them in", fix="name datasets with --data, sequence stores with --store, or both"
        )
    folders = [dataset_folder(path) for path in data]
    # The lists first: whatever stops us after them, the next snapshot is written without these users.
    listed = forget_users(names, folders)
    ids_of = {name: user_ids_of(name) for name in names}
    removed = [_forget_in_store(url, [user_id for ids in ids_of.values() for user_id in ids]) for url in store]

    def num_found(found: Collection[int]) -> int:
        return sum(not set(ids).isdisjoint(found) for ids in ids_of.values())

    everywhere = {user_id for found in (*(one.found for one in listed), *removed) for user_id in found}
    answer = {
        "num_users": len(names),
        "num_found": num_found(everywhere),
        "datasets": [
            {
                "dataset": str(folder),
                "num_found": num_found(one.found),
                "snapshots": [
                    {"snapshot": str(rest.snapshot), "num_users": rest.num_users, "num_events": rest.num_events}
                    for rest in one.remains
                ],
            }
            for folder, one in zip(folders, listed, strict=True)
        ],
        "stores": [
            {
                "store": _without_password(url),
                "num_found": num_found(events),
                "num_events_removed": sum(events.values()),
            }
            for url, events in zip(store, removed, strict=True)
        ],
    }
    typer.echo(json.dumps(answer) if json_output else "\n".join(_summary(answer)))
    if num_lost := len(names) - num_found(everywhere):
        given = counted(len(names), "user")
        say(f"warning: found in none of these: {num_lost:,} of {given} given; look whether the ids are right")


def _summary(answer: dict[str, Any]) -> list[str]:
    from tackboard.core.errors import counted

    num_users = answer["num_users"]
    lines = [
        f"{one['store']}: {counted(one['num_events_removed'], 'event')} removed, "
        f"of {one['num_found']:,} of {counted(num_users, 'user')}"
        for one in answer["stores"]
    ]
    for one in answer["datasets"]:
        lines.append(
            f"{one['dataset']}: {counted(num_users, 'user')} will be in no further snapshot; "
            f"{one['num_found']:,} found in those there are"
        )
        for rest in one["snapshots"]:
            name = rest["snapshot"].rpartition("/")[2]
            lines.append(
                f"  {name} still holds {rest['num_users']:,} forgotten, with {counted(rest['num_events'], 'event')}"
            )
        if one["snapshots"]:
            lines.append(f"  make one without them, and remove these: tackboard data retain {one['dataset']} --prune")
    return lines


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else url


def _forget_in_store(url: str, user_ids: list[int]) -> dict[int, int]:
    """The users who had events in the store, each with how many were removed."""
    from tackboard.events.sequence_store import open_store

    opened = open_store(url)
    try:
        removed = {user_id: int(opened.forget(user_id)) for user_id in user_ids}
    finally:
        opened.close()
    return {user_id: count for user_id, count in removed.items() if count}
