"""This module defines the canonical event table, to which an import converts every log.

The table is an Arrow table with the columns below. `complete_events` adds int64 ids and sorts the events by (user_id,
time_ms, order), which is their order on disk. Decided: an int64 id is used as it is, and a string id is replaced by its
8-byte BLAKE2b hash, so no mapping file is needed to score a request. Two strings with the same hash raise DataError and
are never merged. Further columns of a log are called fields. They keep their names and follow the canonical columns.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id

NAMES = pa.dictionary(pa.int32(), pa.string())
"""Arrow type of strings that occur many times, such as actions, surfaces and string ids."""

EVENT_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "user": (pa.int64(), NAMES),
    "item": (pa.int64(), NAMES),
    "action": (NAMES,),
    "surface": (NAMES,),
    "time_ms": (pa.int64(),),
    "received_ms": (pa.int64(),),
    "order": (pa.int64(),),
}
"""Maps each required column to its allowed types. Required columns have no nulls. Times are ms UTC."""
OPTIONAL_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "request": (pa.int64(), pa.string()),
    "position": (pa.int32(),),
    "context": (pa.string(),),
}
"""Maps each optional column to its allowed types. Nulls are allowed. `position` counts from 0, `context` is JSON."""
FIELD_KINDS: dict[pa.DataType, str] = {
    pa.int64(): "int",
    pa.float64(): "float",
    pa.bool_(): "bool",
    pa.string(): "string",
    NAMES: "string",
}
"""Maps each type that a field may have to the name of the type. Nulls are allowed in fields."""
RESERVED_NAMES = frozenset({*EVENT_COLUMNS, *OPTIONAL_COLUMNS, "user_id", "item_id", "id", "time", "received"})
"""Names that no field may have: the names of the canonical columns, and their names in the feature language."""
FIELD_NAME_RULE = "lower-case letters, digits and `_`, starting with a letter, not a Python keyword"
_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_events(events: pa.Table) -> None:
    """Raises DataError unless `events` has the canonical columns and types, and no null in a required column."""
    for name, types in EVENT_COLUMNS.items():
        if name not in events.column_names:
            raise DataError(f"events lack the column {name}", allowed=f"required: {', '.join(EVENT_COLUMNS)}")
        _check_type(events, name, types)
        if events[name].null_count:
            raise DataError(
                f"{events[name].null_count} events have no {name}", allowed="allowed: a value in every event"
            )
    for name, types in OPTIONAL_COLUMNS.items():
        if name in events.column_names:
            _check_type(events, name, types)
    for name in [n for n in events.column_names if n not in EVENT_COLUMNS and n not in OPTIONAL_COLUMNS]:
        if name in RESERVED_NAMES:
            raise DataError(
                f"events have a field named {name}, which is reserved",
                allowed=f"reserved: {', '.join(sorted(RESERVED_NAMES))}",
            )
        if not is_field_name(name):
            raise DataError(f"events have a field named {name!r}", allowed=f"allowed: {FIELD_NAME_RULE}")
        if events.column_names.count(name) > 1:
            raise DataError(f"events have two fields named {name}", fix="rename one of them")
        _check_type(events, name, tuple(FIELD_KINDS))


def complete_events(events: pa.Table) -> pa.Table:
    """Checks `events`, adds user_id and item_id, and sorts the rows by (user_id, time_ms, order).

    The canonical columns come first, in the order of this module, and then the ids. The fields come last, in the order
    that they have in `events`. Fields of text are dictionary-encoded.
    """
    check_events(events)
    user_id, item_id = ids_of(events["user"], "user"), ids_of(events["item"], "item")
    names = [n for n in (*EVENT_COLUMNS, *OPTIONAL_COLUMNS) if n in events.column_names]
    table = events.select(names).unify_dictionaries().combine_chunks()
    table = table.append_column("user_id", pa.array(user_id)).append_column("item_id", pa.array(item_id))
    for name in field_names(events):
        field = events[name]
        # The text is decoded before it is encoded, because the caller's dictionary may hold a string twice, or a null.
        is_text = FIELD_KINDS[field.type] == "string"
        table = table.append_column(name, encode(field.cast(pa.string())) if is_text else field.combine_chunks())
    order = np.lexsort((numpy_column(events, "order"), numpy_column(events, "time_ms"), user_id))
    return table if np.array_equal(order, np.arange(len(order))) else table.take(pa.array(order))


def field_names(events: pa.Table) -> list[str]:
    """Returns the columns of `events` that are fields. The columns user_id and item_id need not exist yet."""
    ours = {*EVENT_COLUMNS, *OPTIONAL_COLUMNS, "user_id", "item_id"}
    return [name for name in events.column_names if name not in ours]


def is_field_name(name: str) -> bool:
    """Returns whether `name` has the form of a field name. Does not check for reserved names."""
    return bool(_FIELD_NAME.fullmatch(name)) and not keyword.iskeyword(name)


def ids_of(column: pa.ChunkedArray, what: str) -> NDArray[np.int64]:
    """Returns int64 ids. Integers are kept, and strings are hashed. Two strings with the same hash raise DataError."""
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy(), dtype=np.int64)
    array = encode(column)
    hashed = np.array([string_id(text) for text in array.dictionary.to_pylist()], dtype=np.int64)
    distinct, first = np.unique(hashed, return_index=True)
    if len(distinct) != len(hashed):
        second = np.setdiff1d(np.arange(len(hashed)), first)[0]
        # Messages never contain the raw id of a user.
        clash = f"{what} {array.dictionary[int(second)].as_py()!r}" if what == "item" else f"one {what}"
        raise DataError(f"{clash} has the same 64-bit id as another", fix=f"rename one of the two {what}s")
    return np.asarray(hashed[array.indices.to_numpy()], dtype=np.int64)


def encode(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """Returns a string column as one dictionary array. The dictionary of a plain text column holds each string once."""
    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.unify_dictionaries()
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
    return column if pa.types.is_dictionary(column.type) else column.cast(pa.string()).dictionary_encode()


def named(codes: NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    """Returns a dictionary array in which `names[c]` stands in place of each code c."""
    indices = pa.array(codes.astype(np.int32, copy=False))
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))


def without_unused_names(table: pa.Table, larger_than: int = 0) -> pa.Table:
    """In each dictionary of more than `larger_than` strings, removes the strings that no row uses.

    A filter of rows does not change dictionaries, and Parquet stores complete dictionaries. Without this function, the
    names of users who were filtered out would stay in the file.
    """
    for place, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        column = table[field.name]
        if max((len(chunk.dictionary) for chunk in column.chunks), default=0) > larger_than:
            plain = column.cast(field.type.value_type)
            table = table.set_column(place, field, pc.dictionary_encode(plain).cast(field.type))
    return table


def numpy_column(table: pa.Table, name: str) -> NDArray[Any]:
    """Returns a numeric column without nulls as one NumPy array."""
    return np.asarray(table[name].to_numpy())


def starts_of_users(user_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index at which each user begins in sorted `user_ids`."""
    return np.flatnonzero(np.append(True, user_ids[1:] != user_ids[:-1]))[: len(user_ids)]


def id_type(column_type: pa.DataType) -> str:
    """Takes the Arrow type of an id column. Returns `int64` or `string`, the type of ids in requests and answers."""
    return "int64" if pa.types.is_integer(column_type) else "string"


def _check_type(events: pa.Table, name: str, types: tuple[pa.DataType, ...]) -> None:
    if events[name].type not in types:
        raise DataError(
            f"events.{name} is {events[name].type}", allowed=f"allowed: {' or '.join(str(type_) for type_ in types)}"
        )
