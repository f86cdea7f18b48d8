"""`tackboard verify PATH` checks that data is undamaged; `tackboard doctor` checks that the installation works."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer

REDIS_SCHEMES = ("redis://", "rediss://")


def verify(
    path: str = typer.Argument(
        ..., help="Check this dataset, checkpoint, bundle or sequence store, or this run's latest checkpoint."
    ),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
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
            f"{shown}: sequence store of format version {report.format_version}, no contradictions found, {held}\n"
            f"It has no checksums, so a changed value is not found. Add them: tackboard sequences migrate {shown}"
        )


def doctor(json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text.")) -> None:
    """Check versions and devices, and name a repair for each problem. If something is broken, exit with code 2."""
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
