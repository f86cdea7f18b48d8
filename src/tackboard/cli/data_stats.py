"""`tackboard data stats DATASET`: what the events of a snapshot look like, in numbers and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def data_stats(
    dataset: Path = typer.Argument(
        ..., help="A dataset's folder, of which the newest snapshot is taken, or a snapshot."
    ),
    out: Path | None = typer.Option(None, "--out", help="Write a self-contained HTML page with plots here."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Describe a dataset: events over time, users, items, gaps, lateness, labels, sizes on disk."""
    from tackboard.core.files import write_text_atomic, writing
    from tackboard.events.checks.profile import profile
    from tackboard.events.checks.stats_page import lines, render
    from tackboard.events.dataset import open_dataset

    result = profile(open_dataset(dataset))
    if out is not None:
        with writing("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(out, render(result))
    if json_output:
        typer.echo(json.dumps(result | {"page": None if out is None else str(out)}))
        return
    for line in lines(result):
        typer.echo(line)
    if out is not None:
        typer.echo(f"page: {out}")
