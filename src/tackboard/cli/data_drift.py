"""`tackboard data drift OLD NEW`: how far two snapshots, or two ranges of time, lie apart. Exit code 3: too far."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def data_drift(
    old: Path = typer.Argument(..., help="A dataset or snapshot to compare with."),
    new: Path = typer.Argument(..., help="The dataset or snapshot that may have moved; the same one with two ranges."),
    old_range: str | None = typer.Option(None, help="Days of OLD, UTC, both included: 2026-01-01..2026-01-31."),
    new_range: str | None = typer.Option(None, help="Days of NEW, alike."),
    threshold: float | None = typer.Option(
        None, "--threshold", min=0.0, max=1.0, help="Exit with 3 where a Jensen–Shannon divergence (bits) is above it."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure how far each column moved between two snapshots: L∞ and Jensen–Shannon, worst first."""
    import dataclasses

    from tackboard.core.errors import DataError
    from tackboard.events.checks.drift import measure_drift
    from tackboard.events.checks.measures import Slice, parse_range
    from tackboard.events.dataset import open_dataset

    first, second = parse_range(old_range), parse_range(new_range)
    drift = measure_drift(Slice(open_dataset(old), *first), Slice(open_dataset(new), *second))
    if json_output:
        typer.echo(json.dumps(dataclasses.asdict(drift) | {"threshold": threshold}))
    else:
        width = max(len(one.column) for one in drift.distances)
        typer.echo(f"{'column':<{width}}   JS, bits     L∞  moved most")
        for one in drift.distances:
            moved = f"{one.moved[:40]}: {one.old_share:.2%} → {one.new_share:.2%}"
            typer.echo(f"{one.column:<{width}}   {one.jensen_shannon_bits:8.4f} {one.l_infinity:6.4f}  {moved}")
        for side, names in (("old", drift.only_old), ("new", drift.only_new)):
            if names:
                typer.echo(f"only in {side}, or of another type: {', '.join(names)}")
        typer.echo(f"{drift.num_old:,} old events, {drift.num_new:,} new events")
    far = [one for one in drift.distances if threshold is not None and one.jensen_shannon_bits > threshold]
    if far:
        named = ", ".join(f"{one.column} by {one.jensen_shannon_bits:.4f} bits" for one in far[:3])
        raise DataError(
            f"{len(far)} of {len(drift.distances)} columns moved further than {threshold}: {named}",
            allowed=f"allowed: at most {threshold} bits of Jensen–Shannon divergence (--threshold)",
            fix="look at the worst columns above; train again, or correct the log",
        )
