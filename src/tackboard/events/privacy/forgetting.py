"""Users who must not come back: ids in, a sealed list beside the snapshots of a dataset and tables without them out.

    datasets/<name>/forgotten.json    {"kind": "forgotten users", "format_version": 1, "user_ids": [...], seal}

Whoever writes a snapshot reads the list first, leaves these users out and promotes the snapshot with `promote`, which
refuses where the list has grown meanwhile: so a user who is forgotten during an import is not brought back by it.
Decided: the list holds 64-bit ids and no names; for integer ids the two are the same. A user whose name is a whole
number has two entries, the number and the hash of its text, because the next import may read that column as text. The
list only grows. One that is damaged stops every writer: without it nobody knows who must be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
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
from tackboard.events.schema import ids_of, numpy_column

FILE_NAME = "forgotten.json"
KIND = "forgotten users"
FORMAT_VERSION = 1
LATEST = "latest"
WITH_USERS = ("impressions.parquet", "requests.parquet")
"""Files that may hold users who are not in users.parquet: they were shown something and did nothing."""
_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,18}")
_INT64 = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """The list as it was read: `user_ids` is sorted and holds each id once; `folder` is that of the snapshots."""

    folder: Path
    user_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user_ids)

    def holds(self, user_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `user_ids` are on the list."""
        return np.isin(user_ids, self.user_ids) if len(self) else np.zeros(len(user_ids), dtype=bool)


@dataclasses.dataclass(frozen=True)
class Remains:
    """What a snapshot still holds of users who are on the list."""

    snapshot: Path
    num_users: int
    num_events: int


def user_ids_of(name: str) -> list[int]:
    """The 64-bit ids that a user of this name can have, in a dataset of whole numbers and in one of text."""
    text = name.strip()
    if not text:
        raise UsageError("a user without a name", allowed="allowed: the user's id as it stands in the log")
    ids = [string_id(text)]
    if _WHOLE_NUMBER.fullmatch(text) and _INT64.min <= int(text) <= _INT64.max:
        ids.append(int(text))
    return ids


def dataset_folder(path: Path) -> Path:
    """The folder that holds a dataset's snapshots, given it or one of them. Anything else raises DataError."""
    resolved = path.resolve()
    for folder in (resolved, resolved.parent):
        if (folder / LATEST).is_symlink() and (folder / LATEST / MANIFEST).is_file():
            return folder
    refuse_dangling(path)
    raise DataError(
        f"{path} is no dataset whose snapshots follow each other",
        allowed=f"allowed: datasets/NAME, which holds snapshots and `{LATEST}`",
        fix="give the dataset's folder",
    )


def refuse_dangling(path: Path) -> None:
    """Raises CorruptFileError where `latest` of a dataset's folder, or `path` itself, points at what is gone."""
    for link in (path / LATEST, path):
        if link.is_symlink() and link.name == LATEST and not link.exists():
            left = [snapshot.name for snapshot in snapshots_of(link.parent)]
            raise CorruptFileError(
                f"{link} points at {link.readlink()}, which is gone",
                allowed=f"snapshots that are there: {', '.join(left[-5:]) or 'none'}",
                fix=f"ln -sfn {left[-1]} {link}" if left else "import the log again, or restore it from a copy",
            )


def read_forgotten(folder: Path) -> Forgotten:
    """The list of a dataset's folder; empty where there is none. A damaged one raises CorruptFileError."""
    path = folder / FILE_NAME
    try:
        content = unseal(path.read_bytes())
    except FileNotFoundError:
        return Forgotten(folder, np.zeros(0, dtype=np.int64))
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}") from None
    fix = "restore it from a copy: without it, forgotten users would come back"
    if content is None or content.get("kind") != KIND:
        raise CorruptFileError(f"{path} is corrupt: its own SHA-256 does not match", fix=fix)
    if content.get("format_version", 0) > FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {content['format_version']}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    return Forgotten(folder, np.unique(np.array(content["user_ids"], dtype=np.int64)))


def add_forgotten(folder: Path, user_ids: Iterable[int]) -> Forgotten:
    """Puts users on the list of a dataset's folder, durably; returns the whole list. Two at once both end on it."""
    with _locked(folder):
        remove_leftovers(folder, FILE_NAME)
        known = read_forgotten(folder)
        everyone = np.union1d(known.user_ids, np.array(list(user_ids), dtype=np.int64))
        if len(everyone) > len(known):
            content = {"kind": KIND, "format_version": FORMAT_VERSION, "user_ids": everyone.tolist()}
            write_bytes_atomic(folder / FILE_NAME, seal(content))
    return Forgotten(folder, everyone)


def without_forgotten(table: pa.Table, forgotten: Forgotten) -> pa.Table:
    """`table` without the rows of forgotten users, who are told by its column user_id, or else by user."""
    if not len(forgotten) or not table.num_rows:
        return table
    has_ids = "user_id" in table.column_names
    user_ids = numpy_column(table, "user_id") if has_ids else ids_of(table["user"], "user")
    gone = forgotten.holds(user_ids)
    return without_unused_names(table.filter(pa.array(~gone))) if gone.any() else table


def without_unused_names(table: pa.Table) -> pa.Table:
    """`table` with dictionaries that hold the strings of its rows and no others.

    A filter leaves dictionaries as they are, and Parquet writes them whole: the names of users who were filtered out
    would still stand in the file.
    """
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = table[field.name].cast(field.type.value_type)
            table = table.set_column(place, field, pc.dictionary_encode(plain).cast(field.type))
    return table


def shown_to_others(impressions: pa.Table, events: pa.Table, forgotten: Forgotten) -> pa.Table:
    """`impressions` without those of forgotten users: told by user_id, or else by the requests of their `events`."""
    if "user_id" in impressions.column_names:
        return without_forgotten(impressions, forgotten)
    if not len(forgotten) or "request" not in events.column_names:
        return impressions
    gone = events.filter(pa.array(forgotten.holds(numpy_column(events, "user_id"))))["request"].unique().drop_null()
    return without_values(impressions, "request", gone) if len(gone) else impressions


def without_values(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    """The rows of `table` whose `column` is none of `values`; a null is none of them."""
    is_gone = pc.is_in(table[column], value_set=values.cast(table[column].type))
    return table.filter(pc.invert(is_gone))


def promote(snapshot: Path, forgotten: Forgotten) -> None:
    """Points `latest` at a snapshot that was written without the users on `forgotten`.

    Raises DataError where more users have been forgotten since the list was read; `latest` then stays as it was.
    """
    folder = snapshot.parent
    with _locked(folder):
        if len(read_forgotten(folder)) != len(forgotten):
            raise DataError(
                f"users were forgotten while {snapshot} was written, which may hold them",
                allowed="it was not made the newest snapshot",
                fix="run the command again",
            )
        replace_symlink(folder / LATEST, snapshot.name)


def require_clean(snapshot: Path, forgotten: Forgotten) -> None:
    """Raises DataError where a snapshot holds forgotten users: a snapshot made from it would hold them too."""
    remains = remains_in(snapshot, forgotten)
    if remains.num_users:
        raise DataError(
            f"{snapshot} still holds {counted(remains.num_users, 'user')} on the list of forgotten users",
            allowed="a new snapshot is made only from one without them",
            fix=f"tackboard data retain {snapshot.parent}",
        )


def remains_in(snapshot: Path, forgotten: Forgotten) -> Remains:
    """How many of the forgotten users, with how many events, a snapshot still holds."""
    user_ids, num_events = _held(snapshot, forgotten)
    return Remains(snapshot, len(user_ids), num_events)


def _held(snapshot: Path, forgotten: Forgotten) -> tuple[NDArray[np.int64], int]:
    """The forgotten users that a snapshot holds, sorted, and how many events they have there."""
    if not len(forgotten):
        return forgotten.user_ids, 0
    path = snapshot / "users.parquet"
    try:
        users = pq.read_table(path, columns=["user_id", "num_events"])
        ids = numpy_column(users, "user_id")
        held = forgotten.holds(ids)
        num_events = int(numpy_column(users, "num_events")[held].sum())
        everyone = [ids[held]]
        for name in WITH_USERS:
            path = snapshot / name
            if path.is_file():
                everyone.append(_held_in(path, forgotten))
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from None
    return np.unique(np.concatenate(everyone)), num_events


def _held_in(path: Path, forgotten: Forgotten) -> NDArray[np.int64]:
    """Forgotten users in a Parquet file with or without user_id; row groups that cannot hold one are not read."""
    found = [np.zeros(0, dtype=np.int64)]
    with pq.ParquetFile(path) as file:
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
    """The complete snapshots of a dataset's folder, oldest first."""
    found = (path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith("."))
    return sorted(path for path in found if (path / MANIFEST).is_file())


@dataclasses.dataclass(frozen=True)
class Listed:
    """What came of putting users on a dataset's list: which of the ids given occur in one of its snapshots, and the
    snapshots that still hold forgotten users, these or others."""

    found: frozenset[int]
    remains: list[Remains]


def forget_users(names: Sequence[str], folders: Sequence[Path]) -> list[Listed]:
    """Puts users on the lists of some datasets; says of each dataset who occurs in it, and where."""
    ids = [user_id for name in names for user_id in user_ids_of(name)]
    listed = []
    for folder in folders:
        forgotten = add_forgotten(folder, ids)
        found: set[int] = set()
        remains = []
        for path in snapshots_of(folder):
            held, num_events = _held(path, forgotten)
            found |= set(held.tolist()) & set(ids)
            remains += [Remains(path, len(held), num_events)] if len(held) else []
        listed.append(Listed(frozenset(found), remains))
    return listed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The list and `latest` of a folder change under this lock only."""
    with wait_for_lock(folder / ".lock"):
        yield
