"""Makes a new snapshot from the newest one: keeps its files, adds or replaces some, and points `latest` at the result.

The new snapshot is made beside the old one under a temporary name, with hard links to the files that stay. It becomes
`latest` in one rename at the very end, so a kill at any instant leaves the old snapshot or the complete new one. If a
run is killed after its snapshot was complete but before the snapshot became `latest`, the next run uses this snapshot
instead of making a new one. Forgotten users are never copied: if the old snapshot holds forgotten users, only a writer
that replaces users.parquet may continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import new_directory, remove_leftovers
from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest, write_manifest
from tackboard.events.dataset import KIND, LATEST, Dataset
from tackboard.events.privacy.forgetting import promote, read_forgotten, require_clean

USERS = "users.parquet"
_OWN_KEYS = ("kind", "format_version", "files", "sha256_of_the_above")


def check_newest(dataset: Dataset) -> None:
    """Raises UsageError for an older snapshot, because a new snapshot made from it would lack newer events."""
    snapshot = dataset.path.resolve()
    latest = snapshot.parent / LATEST
    if not latest.is_symlink() or latest.resolve() != snapshot:
        again = f"give {snapshot.parent}; if you did, another job was faster: run the command again"
        raise UsageError(
            f"{snapshot} is not the newest snapshot of a dataset",
            allowed=f"allowed: the snapshot that `{LATEST}` points at",
            fix=again if latest.is_symlink() else "",
        )


def derive_snapshot(
    dataset: Dataset, note: str, what: Any, *, replaced: Collection[str], fill: Callable[[Path], Collection[str]]
) -> Path:
    """Makes a snapshot from the files of `dataset` except `replaced`, and from the files that `fill` writes.

    `dataset` must be the newest snapshot. `fill` gets a folder, writes files into it and returns their names. The
    content of these files must depend only on the old snapshot and on `what`, a JSON value. The digest of both goes
    into the manifest under `note`. If `fill` raises, the old snapshot stays in use. Returns the path of the new
    snapshot. If the old snapshot holds forgotten users, raises DataError, unless `replaced` contains users.parquet.
    """
    check_newest(dataset)
    source = dataset.path.resolve()
    forgotten = read_forgotten(source.parent)
    if USERS not in replaced:
        require_clean(source, forgotten)
    remove_leftovers(source.parent)
    content = [dataset.manifest["sha256_of_the_above"], what]
    identity = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    final = _made_before(source.parent, note, identity)
    if final is None:
        final = source.with_name(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{identity[:8]}")
        with new_directory(final) as staging:
            meant = {*_link_files(dataset, staging, replaced), *fill(staging)}
            # All notes of the old manifest are taken over, so that notes of other tackboard versions stay.
            noted = {key: value for key, value in dataset.manifest.items() if key not in _OWN_KEYS}
            noted |= {note: {"identity": identity, "from": source.name}}
            write_manifest(staging, KIND, noted, meant=meant)
            if (source.parent / LATEST).resolve() != source:
                raise DataError(
                    f"another job made a newer snapshot of {source.parent} meanwhile",
                    allowed="the snapshot of the other job stays, and nothing was added",
                    fix="run the command again",
                )
    promote(final, forgotten)
    return final


def _made_before(folder: Path, note: str, identity: str) -> Path | None:
    """Returns the complete snapshot of a command that was killed before it could move `latest`, or None."""
    for path in sorted(folder.glob(f"*-{identity[:8]}")):
        noted = read_manifest(path).get(note) if (path / MANIFEST).is_file() else None
        if isinstance(noted, dict) and noted.get("identity") == identity:
            verify_manifest(path, KIND)
            return path
    return None


def _link_files(dataset: Dataset, staging: Path, replaced: Collection[str]) -> list[str]:
    """Links the files of the old snapshot under the same names. Files never change, so a link is as good as a copy."""
    names = [str(entry["name"]) for entry in dataset.manifest["files"] if entry["name"] not in replaced]
    for name in names:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(dataset.path / name, target)
        except OSError:
            # Some file systems have no hard links, and some limit their number.
            shutil.copyfile(dataset.path / name, target)
    return names
