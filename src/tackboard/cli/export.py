"""`tackboard export RUN --out BUNDLE` writes a checkpoint as a bundle that can be served."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def export(
    run: Path = typer.Argument(..., help="Export this run or checkpoint folder."),
    out: Path = typer.Option(..., "--out", help="Write the bundle to this folder, which must not exist."),
    name: str = typer.Option("model", "--name", help="Serve the model under this name."),
    version: str = typer.Option("1", "--version", help="Give the model this version, a whole number."),
    tables: str = typer.Option("", "--tables", help="Store the tables in this precision: fp16 (default) or fp32."),
    for_training: bool = typer.Option(
        False,
        "--for-training",
        help="Keep all parameters, and the tables as they were trained, so that `tackboard train --from` can use them.",
    ),
    code: Path | None = typer.Option(
        None, help="Run this Python file, which holds a model of your own. Needed for somebody else's run."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Write a bundle: safetensors and JSON with a manifest, no code."""
    import re

    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.core.errors import UsageError
    from tackboard.export.exporter import export_bundle

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"--name {name} is not valid", allowed="allowed: up to 64 letters, digits, . _ -")
    result = export_bundle(
        find_checkpoint(run), out, name=name, version=version, tables=tables, for_training=for_training, code_file=code
    )
    if json_output:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{out}: {name} version {version}, {result['bytes']:,} bytes, tables in {result['tables']}")
        option = f" --code {result['code_file']}" if result["code_file"] else ""
        if for_training:
            typer.echo(f"start a run from it with: tackboard train RECIPE --from {out}")
        typer.echo(f"serve it with: tackboard serve {out}{option}")
