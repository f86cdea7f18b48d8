"""The Parquet files of a snapshot: what they must hold, and how to read them so that an error names the file.

A manifest proves that the files are the sealed ones, not that their content makes sense, and all later steps rely on
the order of the rows: histories are cut where the user changes, ids are found by bisection. Decided: columns, types and
numbers of rows are compared when a snapshot is opened, from the footers alone. Nulls and order are checked when rows
are read, because only then are the rows in memory. Both checks cost little beside hashing and decoding.
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

_INT64, _TEXT = (pa.int64(),), (NAMES, pa.string())
_NUMBER_OR_TEXT = (pa.int64(), *_TEXT)
Ints = NDArray[np.int64]
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
"""Columns that each file must have, with a value in every row, and the types that these columns may have."""
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
"""The columns that sort the rows of each file. Where one column sorts a file, it has each value once."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around the reading of a Parquet file: an error of Arrow or of the disk becomes a CorruptFileError."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from None


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The row groups of a Parquet file in order, with all columns or some of them."""
    with reading(path), pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def column_bytes(metadata: pq.FileMetaData, groups: Iterable[int]) -> Counter[str]:
    """Compressed bytes of each column in some row groups; the leaves of a nested column count as one column."""
    sizes: Counter[str] = Counter()
    for group in groups:
        row_group = metadata.row_group(group)
        for place in range(row_group.num_columns):
            chunk = row_group.column(place)
            sizes[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size
    return sizes


def check_files(folder: Path, num_rows: Mapping[str, int]) -> None:
    """Checks the footers of a snapshot's Parquet files. `num_rows` holds the known numbers of rows, by file."""
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
    """Raises CorruptFileError where rows lack a value or are out of order.

    `table` holds consecutive rows of the snapshot's file at `path`.
    """
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
    """The rows whose `keys`, compared first key first, are smaller than the keys of the row before.

    `before` holds the keys of the row before the first row. With `strictly`, rows with equal keys count as well.
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
