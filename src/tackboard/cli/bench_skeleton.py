"""`tackboard bench skeleton`: runs the demo and prints what each part of it cost."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_skeleton(
    quick: bool = typer.Option(
        False, "--quick", help="A tiny world and few requests: shows that it works, measures little."
    ),
    out: Path | None = typer.Option(None, "--out", help="Folder to keep the demo in; a temporary one when absent."),
    results: Path | None = typer.Option(None, "--results", help="Folder to write the result into, as Markdown."),
    hardware: str = typer.Option("cpu", "--hardware", help="A short word for this machine, used in the result's name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Measure the whole path: events, training, evaluation, serving, memory."""
    import tempfile

    from tackboard.bench.report import table_lines, write_result
    from tackboard.bench.skeleton import measure, report
    from tackboard.core.progress import say

    with tempfile.TemporaryDirectory(prefix="tackboard-bench-") as scratch:
        result = measure(out or Path(scratch) / "demo", quick=quick)
    if results is not None:
        say(f"written: {write_result(report(result), results, hardware)}")
    if json_output:
        typer.echo(json.dumps(result))
        return
    for line in table_lines(report(result)):
        typer.echo(line)
