"""`tackboard features backfill SPEC --data DATASET`: features of every stored event, as a new snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def features_backfill(
    spec: str = typer.Argument(..., help="file.py[:name], features.json, a bundle, checkpoint, run or dataset."),
    data: Path = typer.Option(..., "--data", help="The dataset's folder; its newest snapshot is taken."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compute the features of every stored event and add them to the dataset, as a new snapshot."""
    import dataclasses

    from tackboard.events.dataset import open_dataset
    from tackboard.features.backfill import backfill
    from tackboard.features.evolution import sentences
    from tackboard.features.feature_set import load_features

    features = load_features(spec)
    result = backfill(open_dataset(data), features)
    if json_output:
        typer.echo(
            json.dumps(
                {
                    "dataset": str(result.path),
                    "set": features.name,
                    "version": features.version,
                    "hash": features.hash,
                    "num_rows": result.num_rows,
                    "computed": result.computed,
                    "taken_over": result.taken_over,
                    "changes": [dataclasses.asdict(change) for change in result.changes],
                }
            )
        )
        return
    for sentence in sentences(result.changes):
        typer.echo(sentence)
    typer.echo(
        f"{result.num_rows:,} events; {len(result.computed)} features computed, "
        f"{len(result.taken_over)} taken over\ndataset  {result.path}"
    )
