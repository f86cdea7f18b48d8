"""`tackboard bench sequences`: the user-sequence store, embedded and on Redis, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_sequences(
    quick: bool = typer.Option(False, "--quick", help="Few users and calls: shows that it works."),
    results: Path | None = typer.Option(None, "--results", help="Folder to write the result into, as Markdown."),
    hardware: str = typer.Option("cpu", "--hardware", help="A short word for this machine, used in the result's name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Measure appends and reads of user sequences: SQLite, and Redis where there is a redis-server."""
    import tempfile

    from tackboard.bench.report import table_lines, write_result
    from tackboard.bench.sequences import measure, report
    from tackboard.core.progress import say

    with tempfile.TemporaryDirectory(prefix="tackboard-bench-") as scratch:
        result = measure(Path(scratch), quick=quick)
    if results is not None:
        say(f"written: {write_result(report(result), results, hardware)}")
    for line in table_lines(report(result)):
        typer.echo(line)
    if json_output:
        typer.echo(json.dumps(result))
