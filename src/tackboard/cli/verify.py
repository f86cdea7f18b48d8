"""`tackboard verify PATH`: proves that a dataset, checkpoint, bundle or sequence store is what was written."""

from __future__ import annotations

import json
from pathlib import Path

import typer

REDIS_SCHEMES = ("redis://", "rediss://")


def verify(
    path: str = typer.Argument(
        ..., help="A dataset, checkpoint or bundle; of a run, its latest checkpoint; or a sequence store."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Check every byte of a dataset, checkpoint or bundle against its manifest, or every block of a sequence store."""
    if path.startswith(REDIS_SCHEMES) or Path(path).is_file():
        _verify_store(path, as_json=json_output)
    else:
        _verify_folder(Path(path), as_json=json_output)


def _verify_folder(path: Path, *, as_json: bool) -> None:
    from tackboard.core.errors import UsageError
    from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest

    if not path.is_dir():
        raise UsageError(
            f"{path} is not a folder", allowed="allowed: a folder that holds MANIFEST.json, or a sequence store"
        )
    places = (path, path / "latest", path / "checkpoints" / "latest")
    path = next((place for place in places if (place / MANIFEST).is_file()), path)
    content = verify_manifest(path, read_manifest(path)["kind"])
    num_bytes = sum(entry["bytes"] for entry in content["files"])
    if as_json:
        typer.echo(
            json.dumps({"path": str(path), "kind": content["kind"], "files": len(content["files"]), "bytes": num_bytes})
        )
    else:
        typer.echo(f"{path}: {content['kind']} intact, {len(content['files'])} files, {num_bytes:,} bytes")


def _verify_store(url: str, *, as_json: bool) -> None:
    import dataclasses

    from tackboard.core.errors import counted
    from tackboard.events.sequence_store import open_store
    from tackboard.events.sequence_store.verification import verify_store

    with open_store(url) as store:
        report = verify_store(store)
        shown = store.seals.where
    if as_json:
        typer.echo(json.dumps({"path": shown, "kind": "sequence store", **dataclasses.asdict(report)}))
        return
    held = f"{counted(report.num_users, 'user')}, {counted(report.num_events, 'event')}"
    if report.has_checksums:
        typer.echo(f"{shown}: sequence store intact, {held}")
    else:
        typer.echo(
            f"{shown}: sequence store of format version {report.format_version} without contradictions, {held}\n"
            f"It has no checksums, so a changed value is not found. Add them: tackboard sequences migrate {shown}"
        )
