"""This module takes new events as plain dictionaries or an Arrow table, checks them, and returns columns.

A plain event needs item_id, action, surface and time_ms. An event without received_ms gets the present time. An event
may lack any of the store's declared fields. An error about one event gives the event's position in the call, but never
the user.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.config import did_you_mean
from tackboard.core.errors import DataError
from tackboard.events.schema import FIELD_KINDS, encode
from tackboard.events.sequence_store.config import BUILT_IN, StoreConfig
from tackboard.events.sequence_store.values import (
    DTYPES,
    Columns,
    Values,
    encode_texts,
    num_rows,
    object_array,
)

Event = Mapping[str, Any]
INT64 = np.iinfo(np.int64)
REQUIRED = ("item_id", "action", "surface", "time_ms")
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int, np.integer),
    "float": (float, int, np.floating, np.integer),
    "bool": (bool, np.bool_),
    "string": (str,),
    "name": (str,),
}


def now_ms() -> int:
    """Returns the time of this machine's clock, in ms UTC."""
    return time.time_ns() // 1_000_000


def columns_of(events: Sequence[Event], config: StoreConfig) -> dict[str, Values]:
    """Turns plain events into columns. A missing value, unknown field or value of a wrong type raises DataError."""
    known = config.columns
    for number, event in enumerate(events):
        if not event.keys() <= known.keys():
            name = min(event.keys() - known.keys())
            raise DataError(
                f"event {number} has a field {name!r}, which the store does not have",
                allowed=f"its fields: {', '.join(known)}",
                fix=did_you_mean(name, known) or "declare a field when the store is made",
            )
    received = now_ms()
    columns: dict[str, Values] = {}
    for name, kind in known.items():
        given = [event.get(name) for event in events]
        if name == "received_ms":
            given = [received if value is None else value for value in given]
        columns[name] = _column(name, kind, given)
    check_times(columns)
    return columns


def columns_from_arrow(table: pa.Table, config: StoreConfig) -> dict[str, Values]:
    """Turns a table of events into the store's columns.

    A missing column, a wrong kind, or a null in a built-in column raises DataError. Further columns are left out.
    """
    check_has_columns(table.column_names, config)
    columns = {name: _from_arrow(table[name], name, kind) for name, kind in config.columns.items()}
    check_times(columns)
    return columns


def check_has_columns(names: Sequence[str], config: StoreConfig) -> None:
    """Raises DataError if events with the columns `names` lack a column of the store."""
    for name in config.columns:
        if name not in names:
            raise DataError(
                f"the events have no column {name}, which the store holds",
                allowed=f"their columns: {', '.join(names)}",
                fix=f"import them with that column, or make a store without {name}",
            )


def check_columns(columns: Columns, num_events: int, config: StoreConfig) -> dict[str, Values]:
    """Checks columns that a caller made, and returns the store's columns.

    Every column of the store must be there, with `num_events` values of the right type.
    """
    for name, kind in config.columns.items():
        if name not in columns:
            raise DataError(f"the events do not have the column {name}", allowed=f"needed: {', '.join(config.columns)}")
        column = columns[name]
        if len(column) != num_events or column.values.dtype != DTYPES[kind]:
            raise DataError(
                f"the column {name} has {len(column)} values of {column.values.dtype}",
                allowed=f"allowed: {num_events} of {np.dtype(DTYPES[kind])}",
            )
        if (column.dictionary is None) == (kind in ("string", "name")):
            raise DataError(
                f"the column {name} has the wrong form",
                allowed="allowed: a dictionary for strings, and only for strings",
            )
        if name in BUILT_IN and column.present is not None and not column.present.all():
            raise DataError(f"{int((~column.present).sum())} events have no {name}", allowed="allowed: a value in each")
    check_times(columns)
    return {name: columns[name] for name in config.columns}


def check_times(columns: Columns) -> None:
    """Raises DataError if a time lies before 1970."""
    for name in ("time_ms", "received_ms"):
        below = np.flatnonzero(columns[name].values < 0)
        if len(below):
            got = int(columns[name].values[below[0]])
            raise DataError(f"event {int(below[0])} has {name} {got}", allowed="allowed: ms since 1970, 0 or more")


def by_user(user_ids: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Returns (user, rising positions of the user's events in the batch) for every user, sorted by user id."""
    if len(user_ids) <= 1:
        return [(int(user), np.zeros(1, dtype=np.int64)) for user in user_ids]
    order = np.argsort(user_ids, kind="stable")
    sorted_ids = user_ids[order]
    borders = np.flatnonzero(sorted_ids[1:] != sorted_ids[:-1]) + 1
    return [(int(user_ids[part[0]]), part) for part in np.split(order, borders)]


def _column(name: str, kind: str, given: list[Any]) -> Values:
    """Checks the plain values of one column and returns the column."""
    there = [value is not None for value in given]
    if name in BUILT_IN and not all(there):
        raise DataError(f"event {there.index(False)} has no {name}", allowed=f"needed: {', '.join(REQUIRED)}")
    allowed = _TYPES[kind]
    for number, value in enumerate(given):
        # In Python a bool is also an int. Here, a bool in place of an int is a mistake.
        right = isinstance(value, allowed) and (kind == "bool" or not isinstance(value, bool))
        if value is not None and (not right or (kind == "int" and not INT64.min <= value <= INT64.max)):
            raise DataError(
                f"event {number} has {name} {str(value)[:40]!r} of type {type(value).__name__}",
                allowed=f"allowed: {'text' if kind in ('string', 'name') else kind + ' of 64 bits'}",
            )
        if kind == "name" and value == "":
            raise DataError(f"event {number} has an empty {name}", allowed="allowed: a word")
    present = None if all(there) else np.array(there, dtype=np.bool_)
    if kind in ("string", "name"):
        codes, dictionary = encode_texts(["" if value is None else value for value in given])
        return Values(codes, present, dictionary)
    return Values(np.array([0 if value is None else value for value in given], dtype=DTYPES[kind]), present)


def _from_arrow(column: pa.ChunkedArray, name: str, kind: str) -> Values:
    wanted = "string" if kind == "name" else kind
    held = "int" if pa.types.is_integer(column.type) else FIELD_KINDS.get(column.type)
    if held != wanted:
        raise DataError(f"the column {name} is {column.type}", allowed=f"the store holds it as {wanted}")
    missing = column.null_count
    present = np.asarray(column.is_valid().to_numpy()) if missing else None
    if name in BUILT_IN and missing:
        raise DataError(f"{missing} events have no {name}", allowed="allowed: a value in each")
    if wanted == "string":
        array = encode(column)
        codes = np.asarray(array.indices.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        return Values(codes, present, object_array(array.dictionary.to_pylist()))
    filled = column.fill_null(False if wanted == "bool" else 0) if missing else column
    return Values(np.asarray(filled.to_numpy(), dtype=DTYPES[kind]), present)


def local_names(columns: Columns, kind: str) -> list[str]:
    """Returns the actions or surfaces in the dictionary of a batch."""
    dictionary = columns[kind].dictionary
    assert dictionary is not None
    return [str(text) for text in dictionary] if num_rows(columns) else []


def with_codes(columns: Columns, codes: Mapping[str, Mapping[str, int]]) -> dict[str, Values]:
    """Returns the batch with its own codes of actions and surfaces replaced by the store's codes."""
    changed = dict(columns)
    for kind, code_of in codes.items():
        mapped = np.array([code_of[name] for name in local_names(columns, kind)], dtype=np.int64)
        changed[kind] = Values(mapped[columns[kind].values])
    return changed
