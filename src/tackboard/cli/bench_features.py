"""`tackboard bench features`: the feature layer against Polars, pandas and Feast."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_features(
    quick: bool = typer.Option(False, "--quick", help="Little data and few requests: shows that it works."),
    results: Path | None = typer.Option(None, "--results", help="Folder to write the result into, as Markdown."),
    hardware: str = typer.Option("cpu", "--hardware", help="A short word for this machine, used in the result's name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Measure 40 features in batch and online, against hand-written Polars, pandas and Feast (make rivals)."""
    import tempfile

    from tackboard.bench.features.run import measure, report
    from tackboard.bench.report import table_lines, write_result
    from tackboard.core.progress import say

    with tempfile.TemporaryDirectory(prefix="tackboard-bench-") as scratch:
        result = measure(Path(scratch), quick=quick)
    if results is not None:
        say(f"written: {write_result(report(result), results, hardware)}")
    if json_output:
        typer.echo(json.dumps(result))
        return
    for line in table_lines(report(result)):
        typer.echo(line)
