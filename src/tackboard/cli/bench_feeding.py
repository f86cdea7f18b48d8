"""`tackboard bench feeding`: how soon batches come, and what a GPU waits for them."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_feeding(
    data: Path | None = typer.Option(None, "--data", help="Dataset to read instead of a made-up one."),
    num_events: int = typer.Option(12_000_000, "--events", min=1000, help="Events of the made-up dataset."),
    tokens: int = typer.Option(65_536, "--tokens", min=512, help="Tokens of a step at most."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Measure tokens per second by the number of workers and, with a GPU, the time of a step fed in three ways."""
    import tempfile

    from tackboard.bench.feeding import measure
    from tackboard.bench.turns import disturbance_lines

    with tempfile.TemporaryDirectory(prefix="tackboard-bench-") as scratch:
        result = measure(Path(scratch), data=data, num_events=num_events, tokens_per_step=tokens)
    typer.echo("workers   million tokens per second   per CPU-second")
    for workers, figures in result["host"].items():
        typer.echo(f"{workers:>7}   {figures['per_s']:>25}   {figures['per_cpu_s']:>14}")
    if result["device"] is None:
        typer.echo("no GPU here: how a step is fed was not measured")
    for way, milliseconds in (result["device"] or {}).items():
        typer.echo(f"{way:<36}{milliseconds:>9} ms")
    for line in disturbance_lines(result):
        typer.echo(line)
    if json_output:
        typer.echo(json.dumps(result))
