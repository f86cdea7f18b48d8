"""The layout of a snapshot cuts every file into the same buckets, and a bucket holds all rows of some users.

    events.parquet    ├── bucket 0 ──┤├──── bucket 1 ────┤├ bucket 2 ┤      one row group each
    requests.parquet  ├ bucket 0 ┤├─ bucket 1 ─┤├──── bucket 2 ──────┤      the requests of the same users
    features.parquet  one row for each row of events.parquet, in the same order

Files are sorted by user_id, so a bucket is a range of users and, in each file, a range of rows. A job that reads the
same bucket of every file has all data of the bucket's users. So joins need no shuffle, and a job needs memory for one
bucket only. Decided: a user is never split, so one user with many events makes a bucket larger than planned.

This module also reads and checks the Parquet files. A manifest proves that the files are unchanged, but not that their
content makes sense. Later steps rely on the order of the rows: they cut histories at each new user, and find ids by
binary search. Decided: when a snapshot is opened, columns, types and numbers of rows are checked in the file footers.
When rows are read, they are checked for nulls and wrong order. Both checks cost little next to hashing and decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.documents import read_document
from tackboard.core.errors import CorruptFileError
from tackboard.core.files import write_json_atomic
from tackboard.events.schema import EVENT_COLUMNS, NAMES, OPTIONAL_COLUMNS, starts_of_users, without_unused_names

FILE_NAME = "layout.json"
VERSION = 1
FILES = ("events", "requests")
"""The files whose buckets a layout may describe."""
ROWS_PER_BUCKET = 65_536
RISING = ("time_ms", "received_ms", "order")
"""Columns whose values mostly rise from row to row."""
LARGE_DICTIONARY = 256
"""If a dictionary has more strings than this, each row group stores only the strings that it uses, to save space."""
Ints = NDArray[np.int64]
_INT64, _TEXT = (pa.int64(),), (NAMES, pa.string())
_NUMBER_OR_TEXT = (pa.int64(), *_TEXT)
Columns = Mapping[str, tuple[pa.DataType, ...]]
REQUIRED: dict[str, Columns] = {
    "events": {name: types if types == _INT64 else (*types, pa.string()) for name, types in EVENT_COLUMNS.items()}
    | {"user_id": _INT64, "item_id": _INT64},
    "items": {"item_id": _INT64, "item": _NUMBER_OR_TEXT},
    "users": {"user_id": _INT64, "user": _NUMBER_OR_TEXT},
    "item_history": {"item_id": _INT64, "valid_from_ms": _INT64},
    "user_history": {"user_id": _INT64, "valid_from_ms": _INT64},
    "requests": {"user_id": _INT64, "time_ms": _INT64, "item_id": (pa.list_(pa.int64()),)},
    "impressions": {"item_id": _INT64},
    "features": {},
}
"""The columns that each file must have, and their allowed types. These columns have a value in every row."""
OPTIONAL: dict[str, Columns] = {
    "events": OPTIONAL_COLUMNS,
    "requests": {"position": (pa.list_(pa.int32()),), "weight": (pa.list_(pa.float32()),)},
    "impressions": {"request": OPTIONAL_COLUMNS["request"], "position": (pa.int32(),), "user_id": _INT64},
}
SORTED: dict[str, tuple[str, ...]] = {
    "events": ("user_id", "time_ms"),
    "items": ("item_id",),
    "users": ("user_id",),
    "item_history": ("item_id", "valid_from_ms"),
    "user_history": ("user_id", "valid_from_ms"),
    "requests": ("user_id", "time_ms"),
}
"""The columns by which the rows of each file are sorted. If a file is sorted by one column, its values are distinct."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The G buckets of a snapshot.

    `first_users` [G] holds the smallest user id of each bucket. `offsets` holds, for each file, the first row of each
    bucket and then the number of rows [G+1]. Users below `first_users[0]` belong to the first bucket, so every user has
    a bucket, even a user without events.
    """

    first_users: Ints
    offsets: Mapping[str, Ints]

    @property
    def num_buckets(self) -> int:
        return len(self.first_users)

    def rows_of(self, file: str, bucket: int) -> tuple[int, int]:
        """Returns the first row of a bucket in a file (`events` or `requests`), and the row after the bucket."""
        offsets = self.offsets[file]
        return int(offsets[bucket]), int(offsets[bucket + 1])

    def buckets_of(self, user_ids: Ints) -> Ints:
        """Returns the bucket of each user."""
        return np.maximum(np.searchsorted(self.first_users, user_ids, side="right") - 1, 0)

    def with_rows(self, file: str, user_ids: Ints) -> Layout:
        """Returns the layout with one more file, whose rows are sorted by `user_ids`."""
        rows = np.searchsorted(user_ids, self.first_users[1:], side="left")
        offsets = np.concatenate([[0], rows, [len(user_ids)]]).astype(np.int64)
        return Layout(self.first_users, {**self.offsets, file: offsets})

    def check_users(self, bucket: int, user_ids: Ints, folder: Path) -> None:
        """Raises CorruptFileError unless `user_ids`, the users of a bucket's events, belong to this bucket."""
        ends = self.first_users[bucket + 1 : bucket + 2]
        if len(user_ids) and (user_ids[0] != self.first_users[bucket] or (user_ids[-1] >= ends).any()):
            raise CorruptFileError(
                f"{folder / FILE_NAME} does not match events.parquet: bucket {bucket} has other users there"
            )

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {"version": VERSION, "first_users": self.first_users.tolist()}
        write_json_atomic(folder / FILE_NAME, content | {name: rows.tolist() for name, rows in self.offsets.items()})


def cut_buckets(user_ids: Ints, rows_per_bucket: int) -> Layout:
    """Cuts events, sorted by `user_ids`, into buckets of at most `rows_per_bucket` rows, or of one larger user."""
    # `starts` holds the first row of each user, and then the number of events.
    starts = np.append(starts_of_users(user_ids), len(user_ids))
    bounds, begin = [], 0
    while begin < len(starts) - 1:
        bounds.append(int(starts[begin]))
        begin = max(int(np.searchsorted(starts, starts[begin] + rows_per_bucket, side="right")) - 1, begin + 1)
    offsets = np.array([*bounds, len(user_ids)], dtype=np.int64)
    return Layout(np.asarray(user_ids[offsets[:-1]], dtype=np.int64), {"events": offsets})


def read_layout(folder: Path, events: Path) -> Layout:
    """Reads the layout of a snapshot. If an old snapshot has no layout.json, its layout is derived from the events."""
    path = folder / FILE_NAME
    if not path.exists():
        return _derive(events)
    numbers = tuple[int, ...]
    content = read_document(path, {"version": int, "first_users": numbers, "events": numbers}, {"requests": numbers})
    if content["version"] > VERSION:
        raise CorruptFileError(
            f"{path} was written by a newer tackboard: layout version {content['version']}",
            allowed=f"allowed: up to version {VERSION}",
        )
    first_users = np.array(content["first_users"], dtype=np.int64)
    offsets = {name: np.array(content[name], dtype=np.int64) for name in FILES if name in content}
    whole = all(len(rows) == len(first_users) + 1 and bool((np.diff(rows) >= 0).all()) for rows in offsets.values())
    # The ids are compared, not subtracted, because the difference of two hashed ids may not fit into int64.
    rising = bool((first_users[1:] > first_users[:-1]).all())
    if not (whole and rising):
        raise CorruptFileError(
            f"{path} is not a valid layout", allowed="allowed: rising users, and one row offset per bucket and file"
        )
    return Layout(first_users, offsets)


def write_buckets(table: pa.Table, offsets: Ints, path: Path) -> None:
    """Writes `table` with one row group per bucket. An empty bucket has no row group."""
    with pq.ParquetWriter(path, table.schema, **_encodings(table.schema)) as writer:
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if last > first:
                piece = without_unused_names(table.slice(first, last - first), larger_than=LARGE_DICTIONARY)
                writer.write_table(piece, row_group_size=last - first)


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Returns write options that store RISING columns as differences, which are smaller and load four times as fast."""
    rising = [field.name for field in schema if field.name in RISING and field.type == pa.int64()]
    if not rising or any(pa.types.is_nested(field.type) for field in schema):
        return {}
    return {
        "use_dictionary": [name for name in schema.names if name not in rising],
        "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
    }


class RowReader:
    """Reads ranges of rows of one Parquet file. Decodes only the row groups and columns that it needs.

    `bytes_read` counts the compressed bytes that were decoded. Do not share a reader between processes or threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        with reading(path):
            self._file = pq.ParquetFile(path)
        metadata = self._file.metadata
        self._starts = np.cumsum([0, *(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))])
        self.schema = self._file.schema_arrow
        self.num_rows = int(self._starts[-1])

    def read(self, spans: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
        """Reads some columns of the rows [first, last) of every span in `spans`, and concatenates the spans."""
        if missing := [name for name in columns if name not in self.schema.names]:
            raise CorruptFileError(f"{self.path} has no column {missing[0]}")
        parts = []
        for first, last in spans:
            low = int(np.searchsorted(self._starts, first, side="right")) - 1
            high = int(np.searchsorted(self._starts, last, side="left"))
            groups = list(range(low, high)) if last > first else []
            with reading(self.path):
                table = self._file.read_row_groups(groups, columns=list(columns), use_threads=False)
            sizes = column_bytes(self._file.metadata, groups)
            self.bytes_read += sum(sizes[name] for name in set(columns))
            parts.append(table.slice(first - int(self._starts[low]), last - first) if groups else table)
            check_rows(parts[-1], self.path)
        if not parts:
            return self.schema.empty_table().select(list(columns))
        return pa.concat_tables(parts).select(list(columns))

    def close(self) -> None:
        self._file.close()


def _derive(events: Path) -> Layout:
    first_users: list[int] = []
    offsets: list[int] = []
    row, previous = 0, None
    for table in row_groups(events, ["user_id"]):
        check_rows(table, events)
        users = table["user_id"].to_numpy()
        # If the rows of a user continue from the previous row group, they all belong to the previous bucket.
        begin = int(np.searchsorted(users, previous, side="right")) if previous is not None else 0
        if begin < len(users):
            first_users.append(int(users[begin]))
            offsets.append(row + begin)
            previous = int(users[-1])
        row += len(users)
    return Layout(np.array(first_users, dtype=np.int64), {"events": np.array([*offsets, row], dtype=np.int64)})


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an Arrow or disk error inside the `with` block into a CorruptFileError that names `path`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from None


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields the row groups of a Parquet file in order, with the given columns (by default all)."""
    with reading(path), pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def column_bytes(metadata: pq.FileMetaData, groups: Iterable[int]) -> Counter[str]:
    """Returns the compressed bytes of each column in the given row groups. Adds up the leaves of a nested column."""
    sizes: Counter[str] = Counter()
    for group in groups:
        row_group = metadata.row_group(group)
        for place in range(row_group.num_columns):
            chunk = row_group.column(place)
            sizes[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size
    return sizes


def check_files(folder: Path, num_rows: Mapping[str, int]) -> None:
    """Checks the footers of a snapshot's Parquet files. `num_rows` gives the expected number of rows of some files."""
    always = ("events", "items", "users", *(["features"] if (folder / "features.json").exists() else []))
    for name, required in REQUIRED.items():
        path = folder / f"{name}.parquet"
        if not path.exists() and name not in always:
            continue
        with reading(path), pq.ParquetFile(path) as file:
            schema, count = file.schema_arrow, file.metadata.num_rows
        if len(set(schema.names)) < len(schema.names):
            raise CorruptFileError(f"{path} has two columns of the same name")
        for column, types in {**OPTIONAL.get(name, {}), **required}.items():
            found = schema.field(column).type if column in schema.names else None
            if found not in types and (column in required or found is not None):
                raise CorruptFileError(
                    f"{path} has no column {column}" if found is None else f"{path}: {column} is {found}",
                    allowed=f"allowed: {' or '.join(map(str, types))}",
                )
        if count != num_rows.get(name, count):
            raise CorruptFileError(f"{path} has {count:,} rows", allowed=f"statistics.json says {num_rows[name]:,}")


def check_rows(table: pa.Table, path: Path) -> None:
    """Raises CorruptFileError if rows have nulls or a wrong order. `table` holds successive rows of the file `path`."""
    for column in REQUIRED.get(path.stem, {}):
        if column in table.column_names and table[column].null_count:
            raise CorruptFileError(f"{path}: {table[column].null_count:,} rows have no {column}")
    keys = [column for column in SORTED.get(path.stem, ()) if column in table.column_names]
    if table.num_rows < 2 or not keys or keys[0] != SORTED[path.stem][0]:
        return
    numbers = [np.asarray(table[key].to_numpy()) for key in keys]
    if len(out_of_order(numbers, None, strictly=len(SORTED[path.stem]) == 1)):
        raise CorruptFileError(f"{path} is not sorted by {' and '.join(keys)}", fix="import the log again")


def out_of_order(keys: Sequence[Ints], before: tuple[int, ...] | None, *, strictly: bool = False) -> Ints:
    """Returns the rows whose `keys` are smaller than the keys of the row before. The first key is compared first.

    `before` holds the keys of the row before row 0, or None. With `strictly`, a row with equal keys is also returned.
    """
    if before is not None:
        keys = [np.concatenate([[first], key]) for first, key in zip(before, keys, strict=True)]
    below = np.zeros(max(len(keys[0]) - 1, 0), dtype=bool)
    equal = np.ones(len(below), dtype=bool)
    for key in keys:
        below |= equal & (key[1:] < key[:-1])
        equal &= key[1:] == key[:-1]
    wrong = np.flatnonzero(below | equal if strictly else below)
    return wrong if before is not None else wrong + 1
