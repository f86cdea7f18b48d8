"""`tackboard features replay LOG`: proves that what was served is what training computes, or names what is not."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def features_replay(
    log: Path = typer.Argument(..., help="The folder of `tackboard serve --log-features`, or one of its files."),
    data: Path = typer.Option(..., "--data", help="The dataset that holds the events of the logged users."),
    key: Path = typer.Option(..., "--key", help="The key that the server was given as --log-key."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Replay only the first so many requests."),
    examples: int = typer.Option(3, "--examples", min=0, help="Differences shown of each feature."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compute logged features again from a dataset and compare them bit for bit. Exit code 3: some differ."""
    from tackboard.core.errors import DataError
    from tackboard.events.dataset import open_dataset
    from tackboard.features.replay import replay
    from tackboard.features.serving_log import read_key

    report = replay(log, open_dataset(data), read_key(key), max_requests=limit, num_examples=examples)
    typer.echo(json.dumps(report.to_json()) if json_output else report.text())
    if report.num_mismatches:
        name, result = report.worst()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in result.mismatches.items() if count)
        others = sum(1 for other in report.features.values() if other.num_mismatches) - 1
        raise DataError(
            f"feature {name} was served otherwise than training computes it: "
            f"{result.num_mismatches:,} of {result.compared:,} values differ ({reasons})",
            allowed=f"{others} more features differ" if others else "",
            fix="docs/serving.md says what the reasons mean",
        )
