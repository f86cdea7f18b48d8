"""`tackboard verify PATH`: proves that a dataset, checkpoint or bundle is what it was when it was written."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def verify(
    path: Path = typer.Argument(..., help="A dataset, checkpoint or bundle; of a run, its latest checkpoint."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Check every byte of a dataset, checkpoint or bundle against its manifest."""
    from tackboard.core.errors import UsageError
    from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest

    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", allowed="allowed: a folder that holds MANIFEST.json")
    places = (path, path / "latest", path / "checkpoints" / "latest")
    path = next((place for place in places if (place / MANIFEST).is_file()), path)
    content = verify_manifest(path, read_manifest(path)["kind"])
    num_bytes = sum(entry["bytes"] for entry in content["files"])
    if json_output:
        typer.echo(
            json.dumps({"path": str(path), "kind": content["kind"], "files": len(content["files"]), "bytes": num_bytes})
        )
    else:
        typer.echo(f"{path}: {content['kind']} intact, {len(content['files'])} files, {num_bytes:,} bytes")
