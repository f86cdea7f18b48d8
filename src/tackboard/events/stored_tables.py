"""This module reads the Parquet files of a snapshot and checks that they hold what later steps rely on.

A manifest proves that the files are unchanged, but not that their content makes sense. Later steps rely on the order of
the rows: they cut histories at each new user, and find ids by binary search. Decided: when a snapshot is opened,
columns, types and numbers of rows are checked in the file footers. When rows are read, they are checked for nulls and
wrong order. Both checks cost little compared with hashing and decoding.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError
from tackboard.events.schema import EVENT_COLUMNS, NAMES, OPTIONAL_COLUMNS

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
    "live_counts": {"item_id": _INT64, "valid_from_ms": _INT64},
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
    "live_counts": ("item_id", "valid_from_ms"),
    "requests": ("user_id", "time_ms"),
}
"""The columns by which the rows of a file must be sorted. If only one column is named, its values must be distinct."""


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
