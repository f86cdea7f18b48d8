"""`tackboard demo` runs the whole path on synthetic data, from a log to a served score and a report."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def demo(
    out: Path = typer.Option(
        Path("demo"), "--out", help="Write everything into this folder; an earlier demo is replaced."
    ),
    quick: bool = typer.Option(
        False, "--quick", help="Use a tiny world and few steps. Every stage runs, but no quality is required."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Make a synthetic log, pretrain on it, train rankers, evaluate, export, serve, score, and write report.html."""
    from tackboard.core.progress import say
    from tackboard.flow.demo import DemoConfig, run_demo
    from tackboard.flow.demo_report import verdict

    outcome = run_demo(DemoConfig(out=out, quick=quick))
    say(verdict(outcome))
    if json_output:
        typer.echo(json.dumps(outcome.summary()))
    else:
        typer.echo(f"report: {out / 'report.html'}")
    if not (outcome.target_met or quick):
        raise typer.Exit(1)
