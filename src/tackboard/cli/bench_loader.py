"""`tackboard bench loader`: the loader against a tuned IterableDataset, Hugging Face datasets and Ray Data."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_loader(
    data: Path | None = typer.Option(None, "--data", help="Dataset to read instead of a made-up one."),
    repeats: int | None = typer.Option(None, "--repeats", min=1, help="How often each is measured; default 3."),
    quick: bool = typer.Option(False, "--quick", help="Little data, once: shows that it works."),
    results: Path | None = typer.Option(None, "--results", help="Folder to write the result into, as Markdown."),
    hardware: str = typer.Option("cpu", "--hardware", help="A short word for this machine, used in the result's name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Measure examples per CPU-second and memory of reading training batches, against three others (make rivals)."""
    import tempfile

    from tackboard.bench.loader.report import report
    from tackboard.bench.loader.run import measure
    from tackboard.bench.report import table_lines, write_result
    from tackboard.core.progress import say

    with tempfile.TemporaryDirectory(prefix="tackboard-bench-") as scratch:
        result = measure(Path(scratch), data=data, repeats=repeats, quick=quick)
    if results is not None:
        say(f"written: {write_result(report(result), results, hardware)}")
    for line in table_lines(report(result)):
        typer.echo(line)
    if json_output:
        typer.echo(json.dumps(result))
