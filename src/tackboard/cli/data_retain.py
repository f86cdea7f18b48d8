"""`tackboard data retain DATASET`: the next snapshot without old events and forgotten users; removes older ones."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def data_retain(
    dataset: Path = typer.Argument(..., help="The dataset's folder; its newest snapshot is taken."),
    days: float | None = typer.Option(
        None, "--days", help="Keep so many days before the newest event; all by default."
    ),
    prune: bool = typer.Option(False, "--prune", help="Remove older snapshots that no unfinished run needs."),
    runs: Path = typer.Option(Path("runs"), "--runs", help="Folder of run directories, looked at by --prune."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Make a snapshot without events that are too old and without forgotten users."""
    import dataclasses

    from tackboard.core.errors import counted
    from tackboard.events.dataset import open_dataset
    from tackboard.events.privacy import retention
    from tackboard.events.privacy.forgetting import dataset_folder

    folder = dataset_folder(dataset)
    if prune:
        # Before anything is written: whoever asks for both should not get one.
        retention.snapshots_in_use(folder, runs)
    result = retention.retain(open_dataset(dataset), days)
    pruned = retention.prune(folder, runs) if prune else retention.Pruned([], {})
    if json_output:
        typer.echo(json.dumps({**dataclasses.asdict(result), "path": str(result.path), **dataclasses.asdict(pruned)}))
        return
    typer.echo(
        f"left out  {counted(result.num_events_removed, 'event')} and {counted(result.num_users_removed, 'user')}; "
        f"forgotten: {counted(result.num_forgotten_removed, 'user')}"
    )
    if result.num_future:
        typer.echo(f"kept      {counted(result.num_future, 'event')} in the future; `data check` names the rows")
    for name in pruned.removed:
        typer.echo(f"removed   {folder / name}")
    for name, run in pruned.kept.items():
        typer.echo(f"kept      {folder / name}: the run {run} is unfinished and needs it")
    if result.num_events_removed and not prune:
        typer.echo("          older snapshots still hold them; --prune removes those that no unfinished run needs")
    typer.echo(f"dataset   {result.path}")
