"""What the Parquet files of a snapshot must hold: files and tables in, nothing or an error that names the file out.

A manifest proves that files are those that were sealed, not that they make sense, and everything downstream relies on
their order: histories are cut where the user changes, ids are found by bisection. Decided: columns, types and numbers
of rows are compared when a snapshot is opened, from the footers alone; nulls and order when rows are read, because
only then are they in memory. Both cost little beside hashing and decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Columns of each file that must be there and hold a value in each row, and the types they may have."""
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
"""What the rows of each file are sorted by; one column alone has each value once."""


def check_files(folder: Path, num_rows: Mapping[str, int]) -> None:
    """Compares the footers of a snapshot's Parquet files with what they must be; `num_rows` by file, where known."""
    always = ("events", "items", "users", *(["features"] if (folder / "features.json").exists() else []))
    for name, required in REQUIRED.items():
        path = folder / f"{name}.parquet"
        if not path.exists() and name not in always:
            continue
        try:
            with pq.ParquetFile(path) as file:
                schema, count = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptFileError(f"{path} cannot be read: {error}") from None
        if len(set(schema.names)) < len(schema.names):
            raise CorruptFileError(f"{path} has two columns of one name")
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
    """Raises CorruptFileError where rows of a snapshot's file lack a value or are out of order.

    The rows of `table` lie together in the file.
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
    """Rows whose `keys`, first key first, are below those of the row before them (`before` of the first row).

    With `strictly`, equal ones count as well.
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
