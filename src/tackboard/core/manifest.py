"""MANIFEST.json: what a folder holds, provable to the last bit.

Written last, it lists every file with its size and SHA-256 and ends with the SHA-256 of its own preceding bytes, so a
flipped bit anywhere, the manifest included, is found and the file named. It is also the commit marker: a folder
without one was never finished. safetensors, torch.save and DCP all load flipped bits silently; this does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tackboard.core.errors import CorruptFileError, DataError, StorageError
from tackboard.core.files import fsync_path, reach, sha256_file, write_bytes_atomic

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
_SEAL = b',\n  "sha256_of_the_above": "'
_END = b'"\n}\n'
_HEX_DIGITS = 64


def write_manifest(
    folder: Path, kind: str, extra: Mapping[str, Any] | None = None, *, meant: Collection[str] | None = None
) -> None:
    """Fsyncs and hashes every file under `folder`, then writes its manifest. `extra` is stored beside the list.

    `meant` names the files that the caller wrote. If one is missing or there are others, StorageError is raised and
    nothing is sealed: somebody else has been in the folder. None takes what is there, to seal a changed folder again.
    """
    files: list[dict[str, Any]] = []
    for path in _listed_files(folder):
        fsync_path(path)
        reach(f"{path.name}:after-fsync")
        name = path.relative_to(folder).as_posix()
        files.append({"name": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)})
    for path in sorted(p for p in folder.rglob("*") if p.is_dir()):
        fsync_path(path)
    differing = set() if meant is None else {entry["name"] for entry in files} ^ set(meant)
    if differing:
        raise StorageError(
            f"{folder} does not hold what was written to it: {', '.join(sorted(differing)[:5])}",
            allowed="nothing was kept; another process removed or added files there",
            fix="stop the other process, then run the command again",
        )
    content = {"kind": kind, "format_version": FORMAT_VERSION, **(extra or {}), "files": files}
    write_bytes_atomic(folder / MANIFEST, seal(content))


def verify_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of `folder` after checking all of it. Any difference raises CorruptFileError naming the file."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", allowed=f"allowed: a {kind} folder, which holds {MANIFEST}")
    content = read_manifest(folder)
    if content.get("kind") != kind:
        raise DataError(f"{folder} is a {content.get('kind')}", allowed=f"allowed: a {kind}")
    listed = {entry["name"]: entry for entry in content["files"]}
    present = {path.relative_to(folder).as_posix() for path in _listed_files(folder)}
    for name in sorted(present - set(listed)):
        raise CorruptFileError(f"{folder / name} is not in the manifest", fix="remove it, or make the folder again")
    for name, entry in listed.items():
        _verify_file(folder / name, entry)
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, its own seal and version checked, the files it lists not."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing: the folder was never finished") from None
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    content = unseal(data)
    if content is None:
        raise CorruptFileError(
            f"{path} is corrupt: its own SHA-256 does not match", fix="restore it, or make the folder again"
        )
    if content.get("format_version", 0) > FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {content['format_version']}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    return content


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON bytes of `content` whose last entry is the SHA-256 of everything before that digest."""
    body = json.dumps(content, indent=2).encode().removesuffix(b"\n}") + _SEAL
    return body + hashlib.sha256(body).hexdigest().encode() + _END


def unseal(data: bytes) -> dict[str, Any] | None:
    """The content of sealed bytes, or None where a bit differs."""
    body, digest = data[: -len(_END) - _HEX_DIGITS], data[-len(_END) - _HEX_DIGITS : -len(_END)]
    intact = data.endswith(_END) and body.endswith(_SEAL) and hashlib.sha256(body).hexdigest().encode() == digest
    if not intact:
        return None
    content: dict[str, Any] = json.loads(data)
    return content


def _listed_files(folder: Path) -> list[Path]:
    """Every file under `folder` but its own manifest; one of that name further down counts like any other."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file() or path.is_symlink():
        raise CorruptFileError(f"{path} is missing", fix="restore it, or make the folder again")
    if path.stat().st_size != entry["bytes"]:
        raise CorruptFileError(f"{path} has {path.stat().st_size} bytes", allowed=f"the manifest says {entry['bytes']}")
    try:
        digest = sha256_file(path)
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    if digest != entry["sha256"]:
        raise CorruptFileError(
            f"{path} is corrupt: its SHA-256 differs from the manifest's", fix="restore it, or make the folder again"
        )
