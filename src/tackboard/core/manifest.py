"""Writes and verifies MANIFEST.json, which lists the files of a folder, so that a single changed bit is found.

The manifest holds the size and SHA-256 of every file, and ends with the SHA-256 of all bytes before this hash. A
flipped bit anywhere, even in the manifest, is found, and the error names the file. The manifest is written last, so a
folder without a manifest was never finished. (safetensors, torch.save and DCP would load flipped bits without an
error.) Decided: a sealed folder (a folder with a manifest) may contain plain files and folders only. A symbolic link
could lead outside the folder, and a pipe would block its reader. Neither is ever opened: an error names the link or
pipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
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
_DIGEST = re.compile(f"[0-9a-f]{{{_HEX_DIGITS}}}")


def write_manifest(
    folder: Path,
    kind: str,
    extra: Mapping[str, Any] | None = None,
    *,
    meant: Collection[str] | None = None,
    hashes: Mapping[str, str] | None = None,
) -> None:
    """Fsyncs and hashes every file under `folder`, then writes the folder's manifest, which also holds `extra`.

    `meant` names the files that the caller wrote. If the folder has other files or lacks a file, another process has
    changed it; StorageError is raised and no manifest is written. If `meant` is None, this is not checked.
    `hashes` holds the SHA-256 of files that another process wrote. If a file has another hash, StorageError is raised.
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
            f"{folder} has missing or unexpected files: {', '.join(sorted(differing)[:5])}",
            allowed="nothing was kept; another process removed or added files there",
            fix="stop the other process, then run the command again",
        )
    for entry in files:
        if (hashes or {}).get(entry["name"], entry["sha256"]) != entry["sha256"]:
            raise StorageError(
                f"{folder / entry['name']} has changed since another process wrote it",
                allowed="nothing was kept",
                fix="check the disk and its file system, then run the command again",
            )
    content = {"kind": kind, "format_version": FORMAT_VERSION, **(extra or {}), "files": files}
    write_bytes_atomic(folder / MANIFEST, seal(content))


def verify_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Checks all of `folder` and returns its manifest. Any difference raises CorruptFileError with the file's path."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", allowed=f"allowed: a {kind} folder, which holds {MANIFEST}")
    content = read_manifest(folder)
    if content["kind"] != kind:
        raise DataError(f"{folder} is a {content['kind']}", allowed=f"allowed: a {kind}")
    listed = {entry["name"]: entry for entry in content["files"]}
    present = {path.relative_to(folder).as_posix() for path in _listed_files(folder)}
    for name in sorted(present - set(listed)):
        raise CorruptFileError(f"{folder / name} is not in the manifest", fix="remove it, or make the folder again")
    for name, entry in listed.items():
        _verify_file(folder / name, entry)
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of `folder` and checks its SHA-256, version and entries. The listed files are not checked."""
    path = folder / MANIFEST
    _require_plain(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    content = unseal(data)
    if content is None:
        raise CorruptFileError(
            f"{path} is corrupt: its own SHA-256 does not match", fix="restore it, or make the folder again"
        )
    version = content.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    if type(version) is not int or type(content.get("kind")) is not str or type(content.get("files")) is not list:
        raise CorruptFileError(f"{path} is malformed", allowed="needed: kind, format_version and a list of files")
    names: set[str] = set()
    for entry in content["files"]:
        if not _is_entry(entry) or entry["name"] in names:
            raise CorruptFileError(
                f"{path} is malformed: it lists {str(entry)[:200]}",
                allowed="allowed: one entry per file: a relative name with /, its size in bytes, its SHA-256",
            )
        names.add(entry["name"])
    return content


def stays_inside(name: Any) -> bool:
    """Returns whether a relative name stays inside its folder: `a` or `a/b`, no `..`, nothing absolute."""
    if not isinstance(name, str) or "\\" in name or not name.isprintable():
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns `content` as JSON bytes. The last entry is the SHA-256 of all bytes before the digest itself."""
    body = json.dumps(content, indent=2).encode().removesuffix(b"\n}") + _SEAL
    return body + hashlib.sha256(body).hexdigest().encode() + _END


def unseal(data: bytes) -> dict[str, Any] | None:
    """Does the inverse of `seal`; returns None if a bit has changed or the content is not a JSON object."""
    body, digest = data[: -len(_END) - _HEX_DIGITS], data[-len(_END) - _HEX_DIGITS : -len(_END)]
    intact = data.endswith(_END) and body.endswith(_SEAL) and hashlib.sha256(body).hexdigest().encode() == digest
    if not intact:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _is_entry(entry: Any) -> bool:
    """Returns whether an entry has a size, a hash and a valid name (inside the folder, and not MANIFEST.json)."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
        return False
    named = stays_inside(entry.get("name")) and entry["name"] != MANIFEST
    return named and entry["bytes"] >= 0 and bool(_DIGEST.fullmatch(entry["sha256"]))


def _listed_files(folder: Path) -> list[Path]:
    """Returns every file under `folder` except its own manifest. A MANIFEST.json in a subfolder counts as a file.

    Anything that is neither a plain file nor a folder raises CorruptFileError with its path.
    """
    files = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        for path in (Path(place, name) for name in folders):
            _require_plain(path, stat.S_IFDIR)
        for path in (Path(place, name) for name in names):
            _require_plain(path)
            files.append(path)
    return sorted(path for path in files if path != folder / MANIFEST)


def _raise(error: OSError) -> None:
    raise error


def _require_plain(path: Path, kind: int = stat.S_IFREG) -> None:
    """Raises CorruptFileError unless `path` is of this `kind`: a plain file or a folder. Links are not followed.

    The path is not opened, because opening a pipe would block for ever.
    """
    try:
        found = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        unfinished = ": the folder was never finished" if path.name == MANIFEST else ""
        raise CorruptFileError(
            f"{path} is missing{unfinished}", fix="" if unfinished else "restore it, or make the folder again"
        ) from None
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    if found != kind:
        wanted = "folder" if kind == stat.S_IFDIR else "plain file"
        what = "a symbolic link" if found == stat.S_IFLNK else f"not a {wanted}"
        raise CorruptFileError(
            f"{path} is {what}",
            allowed="allowed: plain files and folders",
            fix="remove it, or make the folder again",
        )


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    _require_plain(path)
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
