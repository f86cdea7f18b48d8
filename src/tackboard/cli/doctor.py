"""`tackboard doctor`: what is installed, what pairs with what, and the line that repairs each problem."""

from __future__ import annotations

from pathlib import Path

import typer


def doctor(json_output: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Report versions, pairings and devices, and how to repair what is broken. Exits 2 if something is."""
    from tackboard.core.doctor import as_json, collect, examine, exit_code

    findings = examine(collect(Path.cwd()))
    if json_output:
        typer.echo(as_json(findings))
    else:
        for finding in findings:
            typer.echo(f"{finding.status:<7} {finding.name:<18} {finding.value}")
            if finding.repair:
                label = "install" if finding.status == "absent" else "repair"
                typer.echo(f"{'':<26} {label}: {finding.repair}")
    raise typer.Exit(exit_code(findings))
