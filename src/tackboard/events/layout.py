"""Cuts the files of a snapshot into the same buckets, and reads ranges of rows. A bucket holds all rows of some users.

    events.parquet    ├── bucket 0 ──┤├──── bucket 1 ────┤├ bucket 2 ┤      one row group each
    requests.parquet  ├ bucket 0 ┤├─ bucket 1 ─┤├──── bucket 2 ──────┤      the requests of the same users
    features.parquet  one row for each row of events.parquet, in the same order

These files are sorted by user_id, so a bucket is a range of users and, in each file, a range of rows. A job that reads
the same bucket of each file has all rows of the bucket's users. So joins need no shuffle, and a job needs memory for
one bucket only. Decided: a user is never split, so one user with many events makes a bucket larger than planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.documents import read_document
from tackboard.core.errors import CorruptFileError
from tackboard.core.files import write_json_atomic
from tackboard.events.schema import starts_of_users, without_unused_names
from tackboard.events.stored_tables import check_rows, column_bytes, reading, row_groups

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


@dataclasses.dataclass(frozen=True)
class Layout:
    """The G buckets of a snapshot.

    `first_users` [G] holds the smallest user id of each bucket. `offsets` [G+1] holds, for each file, the first row of
    each bucket, then the number of all rows. Users below `first_users[0]` belong to the first bucket, so every user has
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
        """Returns the layout with one more file. `user_ids` holds the user of each row of this file, sorted."""
        rows = np.searchsorted(user_ids, self.first_users[1:], side="left")
        offsets = np.concatenate([[0], rows, [len(user_ids)]]).astype(np.int64)
        return Layout(self.first_users, {**self.offsets, file: offsets})

    def check_users(self, bucket: int, user_ids: Ints, folder: Path) -> None:
        """Raises CorruptFileError unless `user_ids`, the users of a bucket's events, belong to this bucket."""
        ends = self.first_users[bucket + 1 : bucket + 2]
        if len(user_ids) and (user_ids[0] != self.first_users[bucket] or (user_ids[-1] >= ends).any()):
            raise CorruptFileError(
                f"{folder / FILE_NAME} does not match events.parquet, whose bucket {bucket} has other users"
            )

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {"version": VERSION, "first_users": self.first_users.tolist()}
        write_json_atomic(folder / FILE_NAME, content | {name: rows.tolist() for name, rows in self.offsets.items()})


def cut_buckets(user_ids: Ints, rows_per_bucket: int) -> Layout:
    """Cuts events with the sorted `user_ids` into buckets. Only a bucket of one user may exceed `rows_per_bucket`."""
    # `starts` holds the first row of each user, followed by the number of events.
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
            f"{path} is not a valid layout",
            allowed="allowed: rising users, and rising row offsets of all buckets in each file",
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
    """Returns write options. RISING columns, stored as differences, take less space and load four times as fast."""
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

    def __init__(self, path: Path, metadata: pq.FileMetaData | None = None) -> None:
        """`metadata` comes from an earlier reader of the same file. With it, the new reader opens much faster."""
        self.path = path
        self.bytes_read = 0
        with reading(path):
            self._file = pq.ParquetFile(path, metadata=metadata)
        self.metadata = metadata = self._file.metadata
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
        # If a user's rows began in the previous row group, all rows of this user belong to the previous bucket.
        begin = int(np.searchsorted(users, previous, side="right")) if previous is not None else 0
        if begin < len(users):
            first_users.append(int(users[begin]))
            offsets.append(row + begin)
            previous = int(users[-1])
        row += len(users)
    return Layout(np.array(first_users, dtype=np.int64), {"events": np.array([*offsets, row], dtype=np.int64)})
