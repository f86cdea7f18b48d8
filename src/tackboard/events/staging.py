"""This module makes a new snapshot from the newest snapshot of a dataset, with some files added or replaced.

The new snapshot is made under a temporary name, with hard links to the unchanged files. At the very end, one rename
points `latest` at it. So after a kill at any instant, `latest` is the old snapshot or the complete new snapshot. If a
command is killed when its snapshot is complete but not yet `latest`, the same command uses this snapshot next time and
does not make another. Forgotten users are never copied: a command that does not replace users.parquet is refused
if the old snapshot holds forgotten users.
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
    """Raises UsageError unless `dataset` is the newest snapshot. A copy of an older snapshot would lack new events."""
    snapshot = dataset.path.resolve()
    latest = snapshot.parent / LATEST
    if not latest.is_symlink() or latest.resolve() != snapshot:
        again = f"give {snapshot.parent}; if you did, another job has made a newer snapshot: run the command again"
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
    content of these files must depend only on the old snapshot and on `what`, a JSON value. A hash of the old manifest
    and `what` is stored in the new manifest, under the key that `note` gives. If `fill` raises, the old snapshot stays
    in use. Returns the path of the new snapshot. Raises DataError if the old snapshot holds forgotten users and
    `replaced` does not contain users.parquet.
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
            # The new manifest keeps all notes of the old one, even notes that this version of tackboard does not know.
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
    """Returns the complete snapshot that an earlier run of this command made before it was killed, or None."""
    for path in sorted(folder.glob(f"*-{identity[:8]}")):
        noted = read_manifest(path).get(note) if (path / MANIFEST).is_file() else None
        if isinstance(noted, dict) and noted.get("identity") == identity:
            verify_manifest(path, KIND)
            return path
    return None


def _link_files(dataset: Dataset, staging: Path, replaced: Collection[str]) -> list[str]:
    """Makes hard links to the files of the old snapshot. These files never change, so a link is as good as a copy."""
    names = [str(entry["name"]) for entry in dataset.manifest["files"] if entry["name"] not in replaced]
    for name in names:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(dataset.path / name, target)
        except OSError:
            # Some file systems have no hard links, and some limit their number. There, the file is copied.
            shutil.copyfile(dataset.path / name, target)
    return names
