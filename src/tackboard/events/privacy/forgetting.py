"""This module keeps a dataset's list of forgotten users in a sealed file, and removes these users from tables.

    datasets/<name>/forgotten.json    {"kind": "forgotten users", "format_version": 1, "user_ids": [...], seal}

Code that writes a snapshot first reads the list, leaves out the users on the list, and calls `promote` at the end.
`promote` fails if the list has grown after it was read, so an import cannot bring back a user who was forgotten while
the import ran. Decided: the list holds 64-bit ids and no names. But if a user's name is an integer, the id is this
integer. Such a user has two entries, the integer and the hash of its text, because the next import may read the user
column as text. The list only grows. If the list is damaged, no snapshot can be written, because the users to leave out
are unknown.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, DataError, UsageError, counted
from tackboard.core.files import remove_leftovers, replace_symlink, write_bytes_atomic
from tackboard.core.hashing import string_id
from tackboard.core.locks import wait_for_lock
from tackboard.core.manifest import MANIFEST, seal, unseal
from tackboard.events.schema import ids_of, numpy_column, without_unused_names
from tackboard.events.stored_tables import reading

FILE_NAME = "forgotten.json"
KIND = "forgotten users"
FORMAT_VERSION = 1
LATEST = "latest"
LOCK = ".lock"
"""The list of forgotten users and the link `latest` change only while this file is locked."""
WITH_USERS = ("impressions.parquet", "requests.parquet")
"""Files that may hold users who are not in users.parquet, because these users have no events."""
_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,18}")
_INT64 = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """The list of forgotten users at the time when it was read. `user_ids` is sorted and holds each id once."""

    user_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user_ids)

    def holds(self, user_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask of the `user_ids` that are on the list."""
        return np.isin(user_ids, self.user_ids) if len(self) else np.zeros(len(user_ids), dtype=bool)


@dataclasses.dataclass(frozen=True)
class Remains:
    """The forgotten users that a snapshot still holds (`user_ids`, sorted), and the number of their events."""

    snapshot: Path
    user_ids: NDArray[np.int64]
    num_events: int

    @property
    def num_users(self) -> int:
        return len(self.user_ids)


def user_ids_of(name: str) -> list[int]:
    """Returns the 64-bit ids that a user can have: the hash of the name and, if the name is an int64, this integer."""
    text = name.strip()
    if not text:
        raise UsageError("the name of a user is empty", allowed="allowed: the user's id as it stands in the log")
    ids = [string_id(text)]
    if _WHOLE_NUMBER.fullmatch(text) and _INT64.min <= int(text) <= _INT64.max:
        ids.append(int(text))
    return ids


def dataset_folder(path: Path) -> Path:
    """Returns the folder of a dataset. `path` is this folder or one of its snapshots. Other paths raise DataError."""
    resolved = path.resolve()
    for folder in (resolved, resolved.parent):
        if (folder / LATEST).is_symlink() and (folder / LATEST / MANIFEST).is_file():
            return folder
    refuse_dangling(path)
    raise DataError(
        f"{path} is not a dataset's folder",
        allowed=f"allowed: datasets/NAME, which holds snapshots and the link `{LATEST}`",
        fix="give the dataset's folder",
    )


def refuse_dangling(path: Path) -> None:
    """Raises CorruptFileError if `path` is, or contains, a link `latest` whose target does not exist."""
    for link in (path / LATEST, path):
        if link.is_symlink() and link.name == LATEST and not link.exists():
            left = [snapshot.name for snapshot in snapshots_of(link.parent)]
            raise CorruptFileError(
                f"{link} points at {link.readlink()}, which does not exist",
                allowed=f"existing snapshots: {', '.join(left[-5:]) or 'none'}",
                fix=f"ln -sfn {left[-1]} {link}" if left else "import the log again, or restore a copy of a snapshot",
            )


def read_forgotten(folder: Path) -> Forgotten:
    """Reads the list of a dataset. If there is no file, the list is empty. A damaged file raises CorruptFileError."""
    path = folder / FILE_NAME
    try:
        content = unseal(path.read_bytes())
    except FileNotFoundError:
        return Forgotten(np.zeros(0, dtype=np.int64))
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    fix = "restore the list from a copy: without the list, forgotten users would come back"
    if content is None or content.get("kind") != KIND:
        raise CorruptFileError(f"{path} is corrupt: its own SHA-256 or its kind is wrong", fix=fix)
    if content.get("format_version", 0) > FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {content['format_version']}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    return Forgotten(np.unique(np.array(content["user_ids"], dtype=np.int64)))


def add_forgotten(folder: Path, user_ids: Iterable[int]) -> Forgotten:
    """Adds users to the list of a dataset, durably. Returns the new list. Concurrent calls do not lose users."""
    with wait_for_lock(folder / LOCK):
        remove_leftovers(folder, FILE_NAME)
        known = read_forgotten(folder)
        everyone = np.union1d(known.user_ids, np.array(list(user_ids), dtype=np.int64))
        if len(everyone) > len(known):
            content = {"kind": KIND, "format_version": FORMAT_VERSION, "user_ids": everyone.tolist()}
            write_bytes_atomic(folder / FILE_NAME, seal(content))
    return Forgotten(everyone)


def without_forgotten(table: pa.Table, forgotten: Forgotten) -> pa.Table:
    """Returns `table` without the rows of forgotten users. Uses the column `user_id` or, if it is missing, `user`."""
    if not len(forgotten) or not table.num_rows:
        return table
    has_ids = "user_id" in table.column_names
    user_ids = numpy_column(table, "user_id") if has_ids else ids_of(table["user"], "user")
    gone = forgotten.holds(user_ids)
    return without_unused_names(table.filter(pa.array(~gone))) if gone.any() else table


def shown_to_others(impressions: pa.Table, events: pa.Table, forgotten: Forgotten) -> pa.Table:
    """Removes impressions of forgotten users. If `impressions` has no user_id, `events` gives each request's user."""
    if "user_id" in impressions.column_names:
        return without_forgotten(impressions, forgotten)
    if not len(forgotten) or "request" not in events.column_names:
        return impressions
    gone = events.filter(pa.array(forgotten.holds(numpy_column(events, "user_id"))))["request"].unique().drop_null()
    return without_values(impressions, "request", gone) if len(gone) else impressions


def without_values(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    """Removes the rows of `table` whose value of `column` is in `values`. Rows with a null stay."""
    is_gone = pc.is_in(table[column], value_set=values.cast(table[column].type))
    return table.filter(pc.invert(is_gone))


def promote(snapshot: Path, forgotten: Forgotten) -> None:
    """Points `latest` at a snapshot that was written without the users of `forgotten`.

    Raises DataError if the list has grown since `forgotten` was read. `latest` then stays as it was.
    """
    folder = snapshot.parent
    with wait_for_lock(folder / LOCK):
        if len(read_forgotten(folder)) != len(forgotten):
            raise DataError(
                f"users were forgotten while {snapshot} was written, so this snapshot may hold them",
                allowed=f"`{LATEST}` still points at the previous snapshot",
                fix="run the command again",
            )
        replace_symlink(folder / LATEST, snapshot.name)


def require_clean(snapshot: Path, forgotten: Forgotten) -> None:
    """Raises DataError if a snapshot holds forgotten users, because a copy of its files would also hold these users."""
    remains = remains_in(snapshot, forgotten)
    if remains.num_users:
        raise DataError(
            f"{snapshot} still holds {counted(remains.num_users, 'user')} on the list of forgotten users",
            allowed="allowed: a snapshot without forgotten users",
            fix=f"tackboard data retain {snapshot.parent}",
        )


def remains_in(snapshot: Path, forgotten: Forgotten) -> Remains:
    """Finds the forgotten users that a snapshot still holds."""
    if not len(forgotten):
        return Remains(snapshot, forgotten.user_ids, 0)
    path = snapshot / "users.parquet"
    with reading(path):
        users = pq.read_table(path, columns=["user_id", "num_events"])
    ids = numpy_column(users, "user_id")
    held = forgotten.holds(ids)
    num_events = int(numpy_column(users, "num_events")[held].sum())
    others = [_held_in(snapshot / name, forgotten) for name in WITH_USERS if (snapshot / name).is_file()]
    return Remains(snapshot, np.unique(np.concatenate([ids[held], *others])), num_events)


def _held_in(path: Path, forgotten: Forgotten) -> NDArray[np.int64]:
    """Returns the forgotten users in the column user_id of a Parquet file. Without this column, the result is empty.

    Skips a row group if no forgotten user lies between its smallest and its largest user_id.
    """
    found = [np.zeros(0, dtype=np.int64)]
    with reading(path), pq.ParquetFile(path) as file:
        if "user_id" not in file.schema_arrow.names:
            return found[0]
        leaves = file.metadata.schema
        place = next(leaf for leaf in range(len(leaves)) if leaves.column(leaf).path == "user_id")
        for group in range(file.num_row_groups):
            known = file.metadata.row_group(group).column(place).statistics
            if known is not None and known.has_min_max:
                low, high = np.searchsorted(forgotten.user_ids, [known.min, known.max + 1])
                if low == high:
                    continue
            ids = np.unique(file.read_row_group(group, columns=["user_id"])["user_id"].to_numpy())
            found.append(ids[forgotten.holds(ids)])
    return np.unique(np.concatenate(found))


def snapshots_of(folder: Path) -> list[Path]:
    """Returns the complete snapshots of a dataset's folder, oldest first."""
    found = (path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith("."))
    return sorted(path for path in found if (path / MANIFEST).is_file())


@dataclasses.dataclass(frozen=True)
class Listed:
    """Holds the given ids that occur in a dataset, and one entry per snapshot that still holds forgotten users."""

    found: frozenset[int]
    remains: list[Remains]


def forget_users(names: Sequence[str], folders: Sequence[Path]) -> list[Listed]:
    """Adds users to the list of every dataset in `folders`. Returns one result per dataset, in the same order."""
    ids = [user_id for name in names for user_id in user_ids_of(name)]
    listed = []
    for folder in folders:
        forgotten = add_forgotten(folder, ids)
        remains = [remains_in(path, forgotten) for path in snapshots_of(folder)]
        found = {user_id for one in remains for user_id in one.user_ids.tolist()} & set(ids)
        listed.append(Listed(frozenset(found), [one for one in remains if one.num_users]))
    return listed
