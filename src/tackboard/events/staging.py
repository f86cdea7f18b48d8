"""A snapshot made from the newest one: its files and some new ones in, a whole snapshot that is `latest` out.

The new snapshot is made beside the old one under a temporary name, with hard links to the files that stay, and becomes
`latest` in one rename at the very end; until then the old one is in use. A kill at any instant leaves the old snapshot
or the whole new one, and what was complete but not yet `latest` is taken up by the next run, not made again. Users who
were forgotten do not come along: where the old snapshot holds some, only a writer that leaves them out may go on.
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
    """An older snapshot cannot be promoted, for `latest` would go back to older events: raises UsageError."""
    snapshot = dataset.path.resolve()
    latest = snapshot.parent / LATEST
    if not latest.is_symlink() or latest.resolve() != snapshot:
        raise UsageError(
            f"{snapshot} is not the newest snapshot of a dataset",
            allowed=f"files are added to the one that {LATEST} points at",
            fix=f"give {snapshot.parent}; if you did, another job was faster: run the command again"
            if latest.is_symlink()
            else "",
        )


def _check_still_newest(source: Path) -> None:
    """Raises DataError where another job made a newer snapshot since ours began: its work would be lost."""
    if (source.parent / LATEST).resolve() != source:
        raise DataError(
            f"another job made a newer snapshot of {source.parent} meanwhile",
            allowed="it stays as that job left it, and nothing was added",
            fix="run the command again",
        )


def derive_snapshot(
    dataset: Dataset, note: str, what: Any, *, replaced: Collection[str], fill: Callable[[Path], Collection[str]]
) -> Path:
    """A snapshot with the files of `dataset`, the newest one, but for `replaced`, and those that `fill` writes.

    `fill` returns the names of the files it wrote. `what` is JSON that decides, together with the old snapshot, what
    they will hold; its digest is noted in the manifest under `note`. Whatever `fill` raises leaves the old snapshot in
    use. Returns the new one's path. A snapshot with forgotten users raises DataError, unless `fill` writes the users
    anew.
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
            # Read from the manifest, so that what another tackboard noted there stays.
            noted = {key: value for key, value in dataset.manifest.items() if key not in _OWN_KEYS}
            noted |= {note: {"identity": identity, "from": source.name}}
            write_manifest(staging, KIND, noted, meant=meant)
            _check_still_newest(source)
    promote(final, forgotten)
    return final


def _made_before(folder: Path, note: str, identity: str) -> Path | None:
    """The complete snapshot of a run that was killed just before it became `latest`, or None."""
    for path in sorted(folder.glob(f"*-{identity[:8]}")):
        noted = read_manifest(path).get(note) if (path / MANIFEST).is_file() else None
        if isinstance(noted, dict) and noted.get("identity") == identity:
            verify_manifest(path, KIND)
            return path
    return None


def _link_files(dataset: Dataset, staging: Path, replaced: Collection[str]) -> list[str]:
    """The files of the old snapshot under the same names; they never change, so a hard link is as good as a copy."""
    names = [str(entry["name"]) for entry in dataset.manifest["files"] if entry["name"] not in replaced]
    for name in names:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(dataset.path / name, target)
        except OSError:
            # Some file systems know no links, and some allow only so many.
            shutil.copyfile(dataset.path / name, target)
    return names
