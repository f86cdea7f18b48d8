"""`tackboard data check DATASET`: says what is wrong with a snapshot on disk. Exit code 3: there are errors."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def data_check(
    dataset: Path = typer.Argument(
        ..., help="A dataset's folder, of which the newest snapshot is taken, or a snapshot."
    ),
    max_user_share: float = typer.Option(
        0.05, "--max-user-share", min=0.0, max=1.0, help="Share of the events above which one user is told."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Look for what is wrong with a dataset: files, types, ranges, duplicates, time travel. Repairs nothing."""
    import dataclasses

    from tackboard.core.errors import DataError, counted
    from tackboard.events.checks.quality import check_dataset

    report = check_dataset(dataset, max_user_share=max_user_share)
    if json_output:
        answer = {
            "dataset": str(report.path),
            "num_events": report.num_events,
            "num_users": report.num_users,
            "num_items": report.num_items,
            "num_errors": report.num_errors,
            "num_warnings": report.num_warnings,
            "findings": [dataclasses.asdict(finding) for finding in report.findings],
        }
        typer.echo(json.dumps(answer))
    else:
        typer.echo(
            f"{report.path}: {counted(report.num_events, 'event')}, {counted(report.num_users, 'user')}, "
            f"{counted(report.num_items, 'item')}"
        )
        for finding in report.findings:
            typer.echo(f"{finding.text}\n         {finding.fix}")
        rows = "; rows are counted from 0" if any(finding.rows for finding in report.findings) else ""
        typer.echo(f"{counted(report.num_errors, 'error')}, {counted(report.num_warnings, 'warning')}{rows}")
    if report.num_errors:
        first = report.findings[0]
        raise DataError(f"{report.path / first.file}: {first.text.partition(': ')[2]}", fix=first.fix)
