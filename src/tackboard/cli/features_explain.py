"""`tackboard features explain SPEC`: the plan behind features: what is computed, how often, and what is shared."""

from __future__ import annotations

import json

import typer


def features_explain(
    spec: str = typer.Argument(..., help="file.py[:name], features.json, a bundle, checkpoint, run or dataset."),
    feature: list[str] | None = typer.Option(None, "--feature", help="Only this feature; repeatable."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show the plan of a feature set, one line per operation."""
    from tackboard.features.feature_set import load_features
    from tackboard.features.plan import LEVELS

    features = load_features(spec)
    if feature:
        features = features.trimmed(feature)
    if not json_output:
        typer.echo(features.explain())
        return
    result = features.to_json()
    for entry, node in zip(result["nodes"], features.plan.nodes, strict=True):
        entry |= {"type": str(node.type), "level": LEVELS[node.level]}
    typer.echo(json.dumps(result))
