"""This module converts raw columns of a log's files to canonical columns, and says which rows are unusable.

If all ids of a column are integers that fit into int64 and have no leading zeros, they become int64. Otherwise all ids
become strings. Spaces around ids are ignored. Actions and surfaces become dictionary-encoded strings. No row is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.vocabulary import UNKNOWN_NAME
from tackboard.events.schema import NAMES, encode

Place = Callable[[int], str]
"""A function that takes a row number and returns the place of this row in words, such as `clicks.csv line 7`."""
_PLAIN_INTEGER = r"^(0|-?[1-9]\d{0,18})$"
_LARGEST_EXACT_FLOAT = float(1 << 53)
_CONTROL = "[\\x00\\n]"


def in_row(row: int) -> str:
    """Returns the place of a row in words, for a column that does not come from a file."""
    return f"row {row + 1}"


@dataclasses.dataclass(frozen=True)
class Ids:
    """A column of ids. `values` holds one int64 or dictionary-encoded string per row."""

    values: pa.Array
    empty: NDArray[np.bool_]
    """Mask of the rows that have no usable id. The value of such a row is a placeholder."""


def parse_ids(column: pa.ChunkedArray, name: str, wanted: str | None = None, place: Place = in_row) -> Ids:
    """Parses ids from a column of integers, whole floats or text. `wanted` (`int64` or `string`) forces the type.

    Columns of other types raise DataError. So do fractions, floats beyond 2^53, integers above 2^63 - 1, and text with
    a NUL byte or a line break. The error names the `place` of the row. A column of text with an integer above 2^63 - 1
    stays text, unless `wanted` is `int64`. With `wanted="int64"`, text that is not an integer counts as empty.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        column = _whole_numbers(column, name, place)
    elif not (pa.types.is_integer(kind) or is_text(kind)):
        raise DataError(f"{place(0)}: the id column {name!r} has type {kind}", allowed="allowed: integers or text")
    if pa.types.is_integer(column.type) and wanted != "string":
        integers = as_int64(column, name, place, fix="store the column as text")
        return Ids(values=one_array(integers.fill_null(0)), empty=column.is_null().to_numpy())
    array = encode(column.cast(pa.string()) if not is_text(kind) else column.fill_null(""))
    refuse_control(array, name, place)
    return _text_ids(array, wanted, name, place)


def parse_names(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> tuple[pa.DictionaryArray, int]:
    """Parses a column of actions or surfaces. Returns one name per row, and the number of rows without a name.

    A row without a name gets the name `unknown`. Columns of lists or structs raise DataError. So does text with a NUL
    byte or a line break.
    """
    array = encode(as_text(column, name, place).fill_null(""))
    refuse_control(array, name, place)
    texts = pc.utf8_trim_whitespace(array.dictionary)
    empty = pc.equal(texts, "").to_numpy(zero_copy_only=False)
    num_empty = int(empty[array.indices.to_numpy()].sum())
    named = pc.if_else(pa.array(empty), UNKNOWN_NAME, texts)
    return _remap(array, named), num_empty


def parse_requests(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> pa.Array:
    """Parses request ids. They become int64 if the file stores them as integers, else text. Empty ids become null."""
    if pa.types.is_integer(column.type):
        return one_array(as_int64(column, name, place, fix="store the column as text"))
    text = one_array(trimmed(as_text(column, name, place)))
    if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
        refuse_control(encode(text.fill_null("")), name, place)
    return text


def parse_positions(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> tuple[pa.Array, int]:
    """Parses positions as int32. Also returns the number of values that are not an integer from 0 to 10^9 - 1.

    These values become null. An empty value also becomes null, but is not counted.
    """
    text = one_array(pc.utf8_trim_whitespace(as_text(column, name, place).fill_null("")))
    good = pc.match_substring_regex(text, r"^\d{1,9}(\.0+)?$").to_numpy(zero_copy_only=False)
    given = pc.not_equal(text, "").to_numpy(zero_copy_only=False)
    whole = pc.replace_substring_regex(text, r"\.0+$", "")
    numbers = pc.if_else(pa.array(good), whole, pa.scalar(None, pa.string())).cast(pa.int32())
    return numbers, int((given & ~good).sum())


def refuse_control(column: pa.DictionaryArray | pa.ChunkedArray, name: str, place: Place) -> None:
    """Raises DataError if a text holds a NUL byte or a line break, which hints at a damaged file or an open quote."""
    array = encode(column)
    bad = pc.match_substring_regex(array.dictionary, _CONTROL)
    if not pc.any(bad).as_py():
        return
    codes = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
    row = int(np.isin(array.indices.to_numpy(zero_copy_only=False), codes).argmax())
    text = array.dictionary[int(array.indices[row].as_py())].as_py()
    kind = "a NUL byte" if "\x00" in text else "a line break"
    raise DataError(
        f"{place(row)}: the column {name!r} holds {kind}",
        allowed="allowed: text on one line",
        fix="write the file again" if "\x00" in text else "look for a quote that was never closed",
    )


def as_int64(column: pa.ChunkedArray, name: str, place: Place, fix: str = "") -> pa.ChunkedArray:
    """Casts a column of integers to int64. A number that does not fit raises DataError."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        row = int((column.fill_null(0).to_numpy() > np.uint64((1 << 63) - 1)).argmax())
        raise DataError(
            f"{place(row)}: the column {name!r} holds a number above 2^63 - 1",
            allowed="allowed: whole numbers of 64 bits",
            fix=fix,
        ) from None


def _text_ids(array: pa.DictionaryArray, wanted: str | None, name: str, place: Place) -> Ids:
    texts = pc.utf8_trim_whitespace(array.dictionary)
    empty = pc.equal(texts, "").to_numpy(zero_copy_only=False)
    whole = pc.match_substring_regex(texts, _PLAIN_INTEGER).to_numpy(zero_copy_only=False)
    indices = array.indices.to_numpy()
    if wanted == "int64" or (wanted is None and len(whole) and bool((whole | empty).all()) and not empty.all()):
        try:
            numbers = pc.if_else(pa.array(whole), texts, "0").cast(pa.int64()).to_numpy()
            return Ids(values=pa.array(numbers[indices]), empty=~whole[indices])
        except pa.ArrowInvalid:
            # An integer of nineteen digits may be above 2^63 - 1. Then it does not fit into int64.
            if wanted == "int64":
                raise DataError(
                    f"{place(0)} or below: the id column {name!r} holds a number above 2^63 - 1",
                    allowed="allowed: whole numbers of 64 bits, as in the events",
                ) from None
    return Ids(values=_remap(array, texts), empty=empty[indices])


def _remap(array: pa.DictionaryArray, values: pa.Array) -> pa.DictionaryArray:
    """Returns `array` with its dictionary replaced by `values`. Equal values are merged."""
    merged = values.dictionary_encode()
    indices = merged.indices.to_numpy()[array.indices.to_numpy()] if len(values) else array.indices.to_numpy()
    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), merged.dictionary).cast(NAMES)


def _whole_numbers(column: pa.ChunkedArray, name: str, place: Place) -> pa.ChunkedArray:
    """Converts floats that stand for integers to int64. Fractions and floats beyond 2^53 raise DataError."""
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    known = ~np.isnan(values)
    odd = known & ((values != np.floor(values)) | (np.abs(values) > _LARGEST_EXACT_FLOAT))
    if odd.any():
        row = int(odd.argmax())
        is_fraction = values[row] != np.floor(values[row])
        what = "fractions" if is_fraction else "floats beyond 2^53, which are not exact"
        raise DataError(f"{place(row)}: the id column {name!r} holds {what}", allowed="allowed: integers or text")
    return pa.chunked_array([pa.array(np.where(known, values, 0).astype(np.int64), mask=~known)])


def as_text(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> pa.ChunkedArray:
    """Casts a column of scalars to plain text. Nulls stay null. Columns of other types raise DataError."""
    column = plain(column)
    try:
        return column.cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise DataError(
            f"{place(0)}: the column {name!r} has type {column.type}", allowed="allowed: text, numbers or booleans"
        ) from None


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns `column` without dictionary encoding."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def trimmed(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Removes surrounding spaces. Empty text becomes null."""
    stripped = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.equal(stripped, ""), pa.scalar(None, pa.string()), stripped)


def is_text(kind: Any) -> bool:
    """Returns whether a type is text. The text may be dictionary-encoded."""
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def has_action(events: pa.Table, actions: Collection[str]) -> NDArray[np.bool_]:
    """Returns a mask of the events whose action is one of `actions`. If `actions` is empty, all events are in it."""
    if not actions:
        return np.ones(events.num_rows, dtype=bool)
    chosen = pc.is_in(one_array(events["action"]).cast(pa.string()), pa.array(actions))
    return np.asarray(chosen.to_numpy(zero_copy_only=False))


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Joins the chunks of a column into one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if isinstance(array, pa.Array) else array.chunk(0)
