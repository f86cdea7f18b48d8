"""`tackboard sequences correct STORE --data DATASET`: a sequence store set right by a snapshot of the log."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def sequences_correct(
    store: str = typer.Argument(..., help="A path, or redis://host:port/db?prefix=name."),
    data: Path = typer.Option(..., "--data", help="The dataset: a snapshot, or the folder of its snapshots."),
    compare_only: bool = typer.Option(False, "--compare", help="Only say what would change."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Replace what the store received before the snapshot's end by the snapshot; readers and writers go on."""
    from tackboard.events.dataset import open_dataset
    from tackboard.events.sequence_store import open_store
    from tackboard.events.sequence_store.correction import compare, correct

    dataset = open_dataset(data)
    with open_store(store) as opened:
        report = compare(opened, dataset) if compare_only else correct(opened, dataset)
    kinds = ("missing", "extra", "different")
    if json_output:
        content = {
            "store": store,
            "snapshot": str(dataset.path),
            "is_changed": not compare_only,
            "horizon_ms": report.horizon_ms,
            "num_users": report.num_users,
            "num_changed_users": report.num_changed_users,
            "actions": {
                action: {kind: counts[kind] for kind in kinds} for action, counts in sorted(report.actions.items())
            },
        }
        typer.echo(json.dumps(content))
        return
    verb = "differ" if compare_only else "were corrected"
    typer.echo(f"{report.num_changed_users:,} of {report.num_users:,} users {verb}")
    if report.actions:
        typer.echo(f"{'action':<20}" + "".join(f"{kind:>12}" for kind in kinds))
    for action, counts in sorted(report.actions.items()):
        typer.echo(f"{action:<20}" + "".join(f"{counts[kind]:>12,}" for kind in kinds))
