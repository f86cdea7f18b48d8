"""`tackboard features check SPEC`: does a feature set compile, fit a dataset, and may it follow an older one?"""

from __future__ import annotations

import json
from pathlib import Path

import typer


def features_check(
    spec: str = typer.Argument(..., help="file.py[:name], features.json, a bundle, checkpoint, run or dataset."),
    data: Path | None = typer.Option(None, "--data", help="A dataset: has it these columns, types and ranges?"),
    against: str | None = typer.Option(None, "--against", help="An older set, spelt like SPEC: may this follow it?"),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compile a feature set and list its features."""
    import dataclasses

    from tackboard.events.dataset import open_dataset
    from tackboard.features.data_check import check_data
    from tackboard.features.evolution import check_evolution, sentences
    from tackboard.features.feature_set import load_features

    features = load_features(spec)
    changes = [] if against is None else check_evolution(load_features(against), features)
    if data is not None:
        check_data(features, open_dataset(data))
    rows = [
        {
            "name": feature.name,
            "type": str(feature.type),
            "level": feature.level,
            "place": feature.place,
            "description": feature.description,
            "hash": feature.hash,
        }
        for feature in features.features()
    ]
    if json_output:
        result = {
            "name": features.name,
            "version": features.version,
            "hash": features.hash,
            "features": rows,
            "data": None if data is None else str(data),
            "changes": [dataclasses.asdict(change) for change in changes],
        }
        typer.echo(json.dumps(result))
        return
    columns = ("name", "type", "level", "place")
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    for row in (dict(zip(columns, columns, strict=True)), *rows):
        typer.echo("  ".join(row[column].ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip())
    typer.echo(f"feature set {features.name}, version {features.version}, {features.hash[:12]}: {len(rows)} features")
    if data is not None:
        typer.echo(f"{data} has every column they read, of the declared type and within the declared range")
    for sentence in sentences(changes):
        typer.echo(f"since {against}: {sentence}")
    if against is not None and not changes:
        typer.echo(f"nothing changed since {against}")
