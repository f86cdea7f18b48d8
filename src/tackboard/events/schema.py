"""The canonical event: what every log becomes before anything else looks at it.

An Arrow table with the columns below goes in; `complete_events` gives it int64 ids and the one order in which events
lie on disk, by (user_id, time_ms, order). Decided: ids are the values themselves where they are int64 and the first 8
bytes of BLAKE2b where they are strings, so no mapping file is needed to score a request; two strings with one id are
refused, never merged. A log's further columns, its fields, follow the canonical ones under their own names.
"""

from __future__ import annotations

import keyword
import re
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id

NAMES = pa.dictionary(pa.int32(), pa.string())
"""Type of strings that repeat: actions, surfaces, string ids."""

EVENT_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "user": (pa.int64(), NAMES),
    "item": (pa.int64(), NAMES),
    "action": (NAMES,),
    "surface": (NAMES,),
    "time_ms": (pa.int64(),),
    "received_ms": (pa.int64(),),
    "order": (pa.int64(),),
}
"""Required columns and the types each may have. None of them holds nulls. Times are ms UTC."""
OPTIONAL_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "request": (pa.int64(), pa.string()),
    "position": (pa.int32(),),
    "context": (pa.string(),),
}
"""Optional columns; nulls are allowed. `position` counts from 0, `context` is JSON."""
FIELD_KINDS: dict[pa.DataType, str] = {
    pa.int64(): "int",
    pa.float64(): "float",
    pa.bool_(): "bool",
    pa.string(): "string",
    NAMES: "string",
}
"""Types that a field may have, and what each is called. Nulls are allowed."""
RESERVED_NAMES = frozenset({*EVENT_COLUMNS, *OPTIONAL_COLUMNS, "user_id", "item_id", "id", "time", "received"})
"""Names that no field may have: our columns, and what features call them."""
FIELD_NAME_RULE = "lower-case letters, digits and `_`, starting with a letter, no word of Python"
_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_events(events: pa.Table) -> None:
    """Raises DataError unless `events` has the canonical columns, types and no null in a required one."""
    for name, types in EVENT_COLUMNS.items():
        if name not in events.column_names:
            raise DataError(f"events lack the column {name}", allowed=f"needed: {', '.join(EVENT_COLUMNS)}")
        _check_type(events, name, types)
        if events[name].null_count:
            raise DataError(f"{events[name].null_count} events have no {name}", allowed="allowed: a value in each")
    for name, types in OPTIONAL_COLUMNS.items():
        if name in events.column_names:
            _check_type(events, name, types)
    for name in [n for n in events.column_names if n not in EVENT_COLUMNS and n not in OPTIONAL_COLUMNS]:
        _check_field(events, name)


def complete_events(events: pa.Table) -> pa.Table:
    """`events` checked, with user_id and item_id added, sorted by (user_id, time_ms, order), in schema order.

    Fields come last, in the order given; those of text are dictionary-encoded.
    """
    check_events(events)
    user_id, item_id = ids_of(events["user"], "user"), ids_of(events["item"], "item")
    names = [n for n in (*EVENT_COLUMNS, *OPTIONAL_COLUMNS) if n in events.column_names]
    table = events.select(names).unify_dictionaries().combine_chunks()
    table = table.append_column("user_id", pa.array(user_id)).append_column("item_id", pa.array(item_id))
    for name in field_names(events):
        table = table.append_column(name, _stored_field(events[name]))
    order = np.lexsort((numpy_column(events, "order"), numpy_column(events, "time_ms"), user_id))
    return table if np.array_equal(order, np.arange(len(order))) else table.take(pa.array(order))


def field_names(events: pa.Table) -> list[str]:
    """The columns of `events`, completed or not, that are fields."""
    ours = {*EVENT_COLUMNS, *OPTIONAL_COLUMNS, "user_id", "item_id"}
    return [name for name in events.column_names if name not in ours]


def is_field_name(name: str) -> bool:
    """Whether a field may be called so, reserved names aside."""
    return bool(_FIELD_NAME.fullmatch(name)) and not keyword.iskeyword(name)


def ids_of(column: pa.ChunkedArray, what: str) -> NDArray[np.int64]:
    """int64 ids of an id column: int64 values unchanged, strings hashed. Two strings with one id raise DataError."""
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy(), dtype=np.int64)
    array = encode(column)
    hashed = np.array([string_id(text) for text in array.dictionary.to_pylist()], dtype=np.int64)
    distinct, first = np.unique(hashed, return_index=True)
    if len(distinct) != len(hashed):
        second = np.setdiff1d(np.arange(len(hashed)), first)[0]
        # Raw ids of users stay out of messages.
        clash = f"{what} {array.dictionary[int(second)].as_py()!r}" if what == "item" else f"one {what}"
        raise DataError(f"{clash} has the same 64-bit id as another", fix=f"rename one of the two {what}s")
    return np.asarray(hashed[array.indices.to_numpy()], dtype=np.int64)


def encode(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """A string column as one dictionary array, whose dictionary holds each string once."""
    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.unify_dictionaries()
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
    return column if pa.types.is_dictionary(column.type) else column.cast(pa.string()).dictionary_encode()


def numpy_column(table: pa.Table, name: str) -> NDArray[Any]:
    """A numeric column without nulls as one NumPy array."""
    return np.asarray(table[name].to_numpy())


def starts_of_users(user_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each user begins among sorted `user_ids`."""
    return np.flatnonzero(np.append(True, user_ids[1:] != user_ids[:-1]))[: len(user_ids)]


def id_type(column_type: pa.DataType) -> str:
    """`int64` or `string`: how ids of this column type are given to the outside."""
    return "int64" if pa.types.is_integer(column_type) else "string"


def _check_field(events: pa.Table, name: str) -> None:
    if name in RESERVED_NAMES:
        raise DataError(f"events have a field {name}", allowed=f"reserved: {', '.join(sorted(RESERVED_NAMES))}")
    if not is_field_name(name):
        raise DataError(f"events have a field {name!r}", allowed=f"allowed: {FIELD_NAME_RULE}")
    if events.column_names.count(name) > 1:
        raise DataError(f"events have two fields {name}", fix="rename one of them")
    _check_type(events, name, tuple(FIELD_KINDS))


def _stored_field(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    if FIELD_KINDS[column.type] != "string":
        return column.combine_chunks()
    # By way of plain text: a dictionary from outside may hold a string twice, or a null.
    return encode(column.cast(pa.string()))


def _check_type(events: pa.Table, name: str, types: tuple[pa.DataType, ...]) -> None:
    if events[name].type not in types:
        raise DataError(
            f"events.{name} is {events[name].type}", allowed=f"allowed: {' or '.join(str(type_) for type_ in types)}"
        )
