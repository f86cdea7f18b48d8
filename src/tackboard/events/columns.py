"""Raw columns of a user's file in, canonical columns and what was wrong with them out.

Ids become int64 where every one is a plain integer, else strings; surrounding spaces never matter. Names of actions
and surfaces become dictionary-encoded strings. Nothing here drops a row: it says which rows are unusable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.vocabulary import UNKNOWN_NAME
from tackboard.events.schema import NAMES, encode

Place = Callable[[int], str]
"""Where a row of a column stands, in words: `clicks.csv line 7`."""
_PLAIN_INTEGER = r"^(0|-?[1-9]\d{0,18})$"
_LARGEST_EXACT_FLOAT = float(1 << 53)
_CONTROL = "[\\x00\\n]"


def in_row(row: int) -> str:
    """The place of a row of a column that stands alone."""
    return f"row {row + 1}"


@dataclasses.dataclass(frozen=True)
class Ids:
    """An id column: int64 or dictionary-encoded strings, one value per row."""

    values: pa.Array
    empty: NDArray[np.bool_]
    """Rows without a usable id; their value is a placeholder."""

    @property
    def codes(self) -> NDArray[np.int64]:
        """One int64 per row, equal where the ids are equal."""
        array = self.values.indices if pa.types.is_dictionary(self.values.type) else self.values
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)


def parse_ids(column: pa.ChunkedArray, name: str, wanted: str | None = None, place: Place = in_row) -> Ids:
    """Ids of a column of integers, integral floats or text. `wanted` (`int64`, `string`) forces the type.

    Other types, fractions, integers above 2^63 - 1 and text with a NUL byte or a line break raise DataError; `place`
    says where a row stands. With `wanted="int64"`, text that is no integer counts as empty.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        column = _whole_numbers(column, name, place)
    elif not (pa.types.is_integer(kind) or is_text(kind)):
        raise DataError(f"{place(0)}: the id column {name!r} has type {kind}", allowed="allowed: integers or text")
    if pa.types.is_integer(column.type) and wanted != "string":
        integers = _as_int64(column, name, place)
        return Ids(values=one_array(integers.fill_null(0)), empty=column.is_null().to_numpy())
    array = encode(column.cast(pa.string()) if not is_text(kind) else column.fill_null(""))
    refuse_control(array, name, place)
    return _text_ids(array, wanted, name, place)


def parse_names(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> tuple[pa.DictionaryArray, int]:
    """An action or surface column as names, and how many rows had none; those become `unknown`.

    Columns that are no scalars and text with a NUL byte or a line break raise DataError.
    """
    array = encode(as_text(column, name, place).fill_null(""))
    refuse_control(array, name, place)
    trimmed = pc.utf8_trim_whitespace(array.dictionary)
    empty = pc.equal(trimmed, "").to_numpy(zero_copy_only=False)
    num_empty = int(empty[array.indices.to_numpy()].sum())
    named = pc.if_else(pa.array(empty), UNKNOWN_NAME, trimmed)
    return _remap(array, named), num_empty


def parse_requests(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> pa.Array:
    """Request ids: int64 where the file stores integers, else text; empty ones are null."""
    if pa.types.is_integer(column.type):
        return one_array(_as_int64(column, name, place))
    text = one_array(pc.utf8_trim_whitespace(as_text(column, name, place)))
    if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
        refuse_control(encode(text.fill_null("")), name, place)
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def parse_positions(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> tuple[pa.Array, int]:
    """Positions as int32, and how many rows had one that is no integer from 0 to 10^9 - 1; those become null."""
    text = one_array(pc.utf8_trim_whitespace(as_text(column, name, place).fill_null("")))
    good = pc.match_substring_regex(text, r"^\d{1,9}(\.0+)?$").to_numpy(zero_copy_only=False)
    given = pc.not_equal(text, "").to_numpy(zero_copy_only=False)
    whole = pc.replace_substring_regex(text, r"\.0+$", "")
    numbers = pc.if_else(pa.array(good), whole, pa.scalar(None, pa.string())).cast(pa.int32())
    return numbers, int((given & ~good).sum())


def refuse_control(column: pa.DictionaryArray | pa.ChunkedArray, name: str, place: Place) -> None:
    """Raises DataError where a text holds a NUL byte or a line break: a torn file, or a quote that nobody closed."""
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


def first_above_int64(column: pa.ChunkedArray) -> int:
    """The first row of a column of unsigned integers that int64 cannot hold."""
    return int((column.fill_null(0).to_numpy() > np.uint64((1 << 63) - 1)).argmax())


def _as_int64(column: pa.ChunkedArray, name: str, place: Place) -> pa.ChunkedArray:
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        row = first_above_int64(column)
        raise DataError(
            f"{place(row)}: {name!r} holds a number above 2^63 - 1", fix="store the column as text"
        ) from None


def _text_ids(array: pa.DictionaryArray, wanted: str | None, name: str, place: Place) -> Ids:
    trimmed = pc.utf8_trim_whitespace(array.dictionary)
    empty = pc.equal(trimmed, "").to_numpy(zero_copy_only=False)
    plain = pc.match_substring_regex(trimmed, _PLAIN_INTEGER).to_numpy(zero_copy_only=False)
    indices = array.indices.to_numpy()
    if wanted == "int64" or (wanted is None and len(plain) and bool((plain | empty).all()) and not empty.all()):
        usable = pa.array(plain)
        try:
            numbers = pc.if_else(usable, trimmed, "0").cast(pa.int64()).to_numpy()
            return Ids(values=pa.array(numbers[indices]), empty=~plain[indices])
        except pa.ArrowInvalid:
            # Nineteen digits above 2^63 - 1: plain integers, but only as text.
            if wanted == "int64":
                raise DataError(
                    f"{place(0)} or below: {name!r} holds an id above 2^63 - 1, among int64 ids", fix="check the file"
                ) from None
    return Ids(values=_remap(array, trimmed), empty=empty[indices])


def _remap(array: pa.DictionaryArray, values: pa.Array) -> pa.DictionaryArray:
    """`array` with its dictionary replaced by `values`, equal values merged."""
    merged = values.dictionary_encode()
    indices = merged.indices.to_numpy()[array.indices.to_numpy()] if len(values) else array.indices.to_numpy()
    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), merged.dictionary).cast(NAMES)


def _whole_numbers(column: pa.ChunkedArray, name: str, place: Place) -> pa.ChunkedArray:
    """Floats as int64: a column of integers with gaps often comes as floats. Fractions raise DataError."""
    values = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    known = ~np.isnan(values)
    odd = known & ((values != np.floor(values)) | (np.abs(values) > _LARGEST_EXACT_FLOAT))
    if odd.any():
        row = int(odd.argmax())
        raise DataError(f"{place(row)}: the id column {name!r} holds fractions", allowed="allowed: integers or text")
    return pa.chunked_array([pa.array(np.where(known, values, 0).astype(np.int64), mask=~known)])


def as_text(column: pa.ChunkedArray, name: str = "", place: Place = in_row) -> pa.ChunkedArray:
    """A column of scalars as plain text; nulls stay. Other types raise DataError."""
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        return column.cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise DataError(
            f"{place(0)}: the column {name!r} has type {column.type}", allowed="allowed: text, numbers or booleans"
        ) from None


def is_text(kind: Any) -> bool:
    """Whether a type is text, dictionary-encoded or not."""
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if isinstance(array, pa.Array) else array.chunk(0)
