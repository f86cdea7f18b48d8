"""Fields of events: `--field` options and a log's further columns in, named columns of the four field types out.

Parquet says what type a column has; CSV is text, whose values all decide together: whole numbers of 64 bits, else
numbers, else true and false, else text. Decided: a number with leading zeros makes the column text, as it does for
ids, and a column without any value is refused, because its type cannot be known. Contexts, JSON objects, are read here
too: they are a log's other way to say more about an event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tackboard.core.errors import DataError, UsageError
from tackboard.events.columns import Place, as_text, first_above_int64, in_row, is_text, one_array
from tackboard.events.schema import FIELD_NAME_RULE, RESERVED_NAMES, encode, is_field_name

_WHOLE = r"^(0|-?[1-9]\d*)$"
_NUMBER = r"(?i)^(-?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf(inity)?)$"
_TRUTH = r"(?i)^(true|false)$"
ALLOWED = "allowed: whole numbers of 64 bits, numbers, booleans or text"


def parse_field_options(options: Sequence[str]) -> dict[str, str]:
    """`COLUMN` and `name=COLUMN` as field name → column. A name given twice raises UsageError."""
    fields: dict[str, str] = {}
    for option in options:
        name, equals, column = option.partition("=")
        if name in fields:
            raise UsageError(f"--field {option}: there is a field {name} already", fix="give each a name of its own")
        fields[name] = column if equals else name
    return fields


def check_field_name(name: str, column: str) -> None:
    """Raises UsageError unless a field that comes from `column` may be called `name`."""
    rename = f"give it another name: --field another_name={column}"
    if name in RESERVED_NAMES:
        allowed = f"reserved: {', '.join(sorted(RESERVED_NAMES))}"
        raise UsageError(f"a field named {name!r}, which is reserved", allowed=allowed, fix=rename)
    if not is_field_name(name):
        raise UsageError(f"a field named {name!r}", allowed=f"allowed: {FIELD_NAME_RULE}", fix=rename)


def parse_field(column: pa.ChunkedArray, name: str, *, typed: bool, place: Place = in_row) -> pa.Array:
    """A column as int64, float64, bool or dictionary-encoded text, with nulls; `name` and `place` are for the error.

    `typed` says that its type means something (Parquet); else it is text whose values decide, surrounding spaces are
    removed and empty means null. A type that is none of these, and a column without a type, raise DataError.
    """
    kind = column.type
    if is_text(kind):
        text = as_text(column)
        return encode(text) if typed else _guess(encode(_trimmed(text)), name, place)
    try:
        if pa.types.is_integer(kind):
            return one_array(column.cast(pa.int64()))
        if pa.types.is_floating(kind):
            return one_array(column.cast(pa.float64()))
    except pa.ArrowInvalid:
        row = first_above_int64(column)
        raise DataError(f"{place(row)}: the column {name!r} holds a number above 2^63 - 1", allowed=ALLOWED) from None
    if pa.types.is_boolean(kind):
        return one_array(column)
    if pa.types.is_null(kind):
        raise _without_values(name, place)
    raise DataError(
        f"{place(0)}: the column {name!r} has type {kind}", allowed=ALLOWED, fix="convert it, or leave out its --field"
    )


def parse_contexts(column: pa.ChunkedArray, name: str, place: Place = in_row) -> pa.Array:
    """A column of JSON objects as text, null where it is empty. Anything else raises DataError naming its place."""
    if not is_text(column.type):
        raise DataError(
            f"{place(0)}: the context column {name!r} has type {column.type}", allowed="allowed: text of JSON objects"
        )
    array = encode(_trimmed(as_text(column)))
    for code, text in enumerate(array.dictionary.to_pylist()):
        problem = _problem_of(text)
        if problem:
            row = pc.index(array.indices, code).as_py()
            raise DataError(
                f"{place(row)}: the context {problem}",
                allowed='allowed: a JSON object, e.g. {"device": "phone"}, or nothing',
                fix=f"correct the column {name!r}, or leave out --context",
            )
    return array.cast(pa.string())


def _problem_of(text: str) -> str:
    """What is wrong with a context, in words, or an empty string."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return "is not JSON"
    return "" if isinstance(content, dict) else "is JSON, but not an object"


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _guess(array: pa.DictionaryArray, name: str, place: Place) -> pa.Array:
    """Text as the narrowest type that holds every value; only each distinct text is looked at."""
    texts = array.dictionary
    if not len(texts):
        raise _without_values(name, place)
    if _all_match(texts, _WHOLE):
        try:
            return _spread(array, texts.cast(pa.int64()))
        except pa.ArrowInvalid:
            # Beyond 64 bits: a float would round it, so it stays text.
            return array
    if _all_match(texts, _NUMBER):
        return _spread(array, pa.array([float(text) for text in texts.to_pylist()], pa.float64()))
    if _all_match(texts, _TRUTH):
        return _spread(array, pc.equal(pc.utf8_lower(texts), "true"))
    return array


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _spread(array: pa.DictionaryArray, values: pa.Array) -> pa.Array:
    return values.take(array.indices)


def _trimmed(text: pa.ChunkedArray) -> pa.ChunkedArray:
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def _without_values(name: str, place: Place) -> DataError:
    got = f"{place(0)}: the column {name!r} holds no value, so its type is unknown"
    return DataError(got, allowed=ALLOWED, fix="leave out its --field")
