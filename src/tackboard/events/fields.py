"""This module converts columns of a log to fields of events. The options `--field` name these columns.

A Parquet file states the type of a column. In a CSV file, all values are text, and a column gets the first of these
types that fits all its values: 64-bit integer, float, boolean, text. Decided: a number with leading zeros makes the
column text, as in a column of ids. A column of integers that do not all fit into 64 bits also stays text. A CSV
column without any value, and a Parquet column of the type null, are refused, because their type cannot be known. This
module also checks contexts, which are JSON objects with further information about an event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tackboard.core.errors import DataError, UsageError
from tackboard.events.columns import Place, as_int64, as_text, in_row, is_text, one_array, trimmed
from tackboard.events.schema import FIELD_NAME_RULE, RESERVED_NAMES, encode, is_field_name

_WHOLE = r"^(0|-?[1-9]\d*)$"
_NUMBER = r"(?i)^(-?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf(inity)?)$"
_TRUTH = r"(?i)^(true|false)$"
ALLOWED = "allowed: whole numbers of 64 bits, numbers, booleans or text"


def parse_field_options(options: Sequence[str]) -> dict[str, str]:
    """Parses options `COLUMN` or `name=COLUMN`. Returns a dict: field name → column. Equal names raise UsageError."""
    fields: dict[str, str] = {}
    for option in options:
        name, equals, column = option.partition("=")
        if name in fields:
            raise UsageError(f"--field {option}: there is a field {name} already", fix="give each field its own name")
        fields[name] = column if equals else name
    return fields


def check_field_name(name: str, column: str) -> None:
    """Raises UsageError if `name` is not allowed as the name of a field. The message names the field's `column`."""
    rename = f"give the field another name: --field another_name={column}"
    if name in RESERVED_NAMES:
        allowed = f"reserved: {', '.join(sorted(RESERVED_NAMES))}"
        raise UsageError(f"the field name {name!r} is reserved", allowed=allowed, fix=rename)
    if not is_field_name(name):
        raise UsageError(f"{name!r} is not a valid field name", allowed=f"allowed: {FIELD_NAME_RULE}", fix=rename)


def parse_field(column: pa.ChunkedArray, name: str, place: Place = in_row, *, typed: bool) -> pa.Array:
    """Converts a column to int64, float64, bool or dictionary-encoded text, with nulls. Errors show `name` and `place`.

    `typed` means that the column comes from Parquet: its type decides the type of the field. If `typed` is False,
    the column is text, its values decide the type, surrounding spaces are removed, and empty text means null. A column
    of another type, a text column without any value (unless `typed`), or a column of the type null raises DataError.
    """
    kind = column.type
    if is_text(kind):
        text = as_text(column)
        return encode(text) if typed else _guess(encode(trimmed(text)), name, place)
    if pa.types.is_integer(kind):
        return one_array(as_int64(column, name, place))
    if pa.types.is_floating(kind):
        return one_array(column.cast(pa.float64()))
    if pa.types.is_boolean(kind):
        return one_array(column)
    if pa.types.is_null(kind):
        raise _without_values(name, place)
    raise DataError(
        f"{place(0)}: the column {name!r} has type {kind}",
        allowed=ALLOWED,
        fix="convert the column, or leave out its --field",
    )


def parse_contexts(column: pa.ChunkedArray, name: str, place: Place = in_row) -> pa.Array:
    """Checks a column of JSON objects. Empty text becomes null. Text that is not a JSON object raises DataError."""
    if not is_text(column.type):
        raise DataError(
            f"{place(0)}: the context column {name!r} has type {column.type}", allowed="allowed: text of JSON objects"
        )
    array = encode(trimmed(as_text(column)))
    for code, text in enumerate(array.dictionary.to_pylist()):
        problem = _problem_of(text)
        if problem:
            row = pc.index(array.indices, code).as_py()
            raise DataError(
                f"{place(row)}: the context {problem}",
                allowed='allowed: a JSON object, e.g. {"device": "phone"}, or no value',
                fix=f"correct the column {name!r}, or leave out --context",
            )
    return array.cast(pa.string())


def _problem_of(text: str) -> str:
    """Returns what is wrong with a context, in words, or an empty text if nothing is wrong."""
    try:
        # json.loads calls int() for NaN and Infinity, which are not JSON, and int() then raises ValueError.
        content = json.loads(text, parse_constant=int)
    except (ValueError, RecursionError):
        return "is not JSON"
    return "" if isinstance(content, dict) else "is JSON, but not an object"


def _guess(array: pa.DictionaryArray, name: str, place: Place) -> pa.Array:
    """Converts text to int64, float64 or bool if this type fits every value. Otherwise the column stays text."""
    texts = array.dictionary
    if not len(texts):
        raise _without_values(name, place)
    if _all_match(texts, _WHOLE):
        try:
            return texts.cast(pa.int64()).take(array.indices)
        except pa.ArrowInvalid:
            # A float would round an integer that needs more than 64 bits, so the column stays text.
            return array
    if _all_match(texts, _NUMBER):
        return pa.array([float(text) for text in texts.to_pylist()], pa.float64()).take(array.indices)
    if _all_match(texts, _TRUTH):
        return pc.equal(pc.utf8_lower(texts), "true").take(array.indices)
    return array


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _without_values(name: str, place: Place) -> DataError:
    got = f"{place(0)}: the column {name!r} holds no value, so its type is unknown"
    return DataError(got, allowed=ALLOWED, fix="leave out the --field of this column")
