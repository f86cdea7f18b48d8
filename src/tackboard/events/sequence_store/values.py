"""This module holds columns of events in memory, as NumPy arrays with the same layout as the columns of features.

    item_id, time_ms, received_ms, int fields    values int64
    float, bool fields                           values float64, bool
    action, surface, string fields               values int64: codes of `dictionary`

If `dictionary` is None, the codes of action, surface and string fields are codes of the store.
`present` marks the entries that have a value; it is None if no value is missing. The value of a missing entry is
undefined. A dictionary may hold the same string twice, for example after two columns were joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
DTYPES: dict[str, Any] = {"int": np.int64, "float": np.float64, "bool": np.bool_, "string": np.int64, "name": np.int64}


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """One column of events. The table in the module's docstring shows the types. Treat the object as immutable."""

    values: NDArray[Any]
    present: Mask | None = None
    dictionary: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, places: Integers | Mask | slice) -> Values:
        """Returns the entries at `places`, which are indices, a mask or a slice."""
        present = None if self.present is None else self.present[places]
        return Values(self.values[places], present, self.dictionary)

    def to_pylist(self) -> list[Any]:
        """Returns plain Python values, with None for a missing value."""
        flat: list[Any]
        if self.dictionary is None:
            flat = self.values.tolist()
        elif len(self.dictionary):
            flat = self.dictionary.take(self.values, mode="clip").tolist()
        else:
            flat = [None] * len(self.values)
        if self.present is None:
            return flat
        return [value if there else None for value, there in zip(flat, self.present.tolist(), strict=True)]


Columns = Mapping[str, Values]
"""Maps the name of each column to the column. All columns describe the same events."""


def num_rows(columns: Columns) -> int:
    """Returns the number of events in `columns`."""
    return len(next(iter(columns.values())))


def take(columns: Columns, places: Integers | Mask | slice) -> dict[str, Values]:
    """Returns the events at `places`."""
    return {name: column.take(places) for name, column in columns.items()}


def join_values(parts: Sequence[Values]) -> Values:
    """Joins columns of the same kind end to end."""
    if len(parts) == 1:
        return parts[0]
    present = None
    if any(part.present is not None for part in parts):
        present = np.concatenate(
            [np.ones(len(part), dtype=np.bool_) if part.present is None else part.present for part in parts]
        )
    first = parts[0].dictionary
    if first is None or all(part.dictionary is first for part in parts):
        return Values(np.concatenate([part.values for part in parts]), present, first)
    texts, shifted, start = [], [], 0
    for part in parts:
        assert part.dictionary is not None
        texts.append(part.dictionary)
        shifted.append(part.values + start)
        start += len(part.dictionary)
    return Values(np.concatenate(shifted), present, np.concatenate(texts))


def join(parts: Sequence[Columns]) -> dict[str, Values]:
    """Puts parts one after another: each column of the result joins the columns that have the same name in the
    parts. All parts have the same columns."""
    return {name: join_values([part[name] for part in parts]) for name in parts[0]}


def same_columns(one: Columns, other: Columns) -> bool:
    """Returns whether both maps have the same columns, values (bit for bit) and missing entries."""
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Values, other: Values) -> bool:
    if len(one) != len(other):
        return False
    there = np.ones(len(one), dtype=np.bool_) if one.present is None else one.present
    theirs = np.ones(len(one), dtype=np.bool_) if other.present is None else other.present
    if not np.array_equal(there, theirs):
        return False
    left, right = one.values[there], other.values[there]
    if one.dictionary is not None and other.dictionary is not None:
        return bool(np.array_equal(one.dictionary[left], other.dictionary[right]))
    if left.dtype == np.float64:
        left, right = left.view(np.uint64), right.view(np.uint64)
    return bool(np.array_equal(left, right))


def empty_column(kind: str) -> Values:
    """Returns a column of `kind` without entries."""
    dictionary = np.empty(0, dtype=np.object_) if kind == "string" else None
    return Values(np.empty(0, dtype=DTYPES[kind]), None, dictionary)


def encode_texts(texts: Sequence[str]) -> tuple[Integers, NDArray[np.object_]]:
    """Returns the code of each string, and a dictionary of the distinct strings in order of appearance."""
    known: dict[str, int] = {}
    codes = np.fromiter((known.setdefault(text, len(known)) for text in texts), dtype=np.int64, count=len(texts))
    return codes, object_array(list(known))


def object_array(texts: Sequence[str]) -> NDArray[np.object_]:
    """Returns strings as an array of objects. By default NumPy would make an array of fixed-width strings."""
    array = np.empty(len(texts), dtype=np.object_)
    array[:] = texts
    return array
