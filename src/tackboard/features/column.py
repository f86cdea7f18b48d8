"""This module defines `Column`, the unified feature representation: one container for every value that a model reads.

A `Column` holds the values of one feature for many rows in flat NumPy arrays:

    scalar    values [n]                bool, int64 (int, id, time), float64, or codes into `dictionary` (string)
    vector    values [n, width]         float32
    list      values [all], offsets [n+1]
    sequence  fields: name → list column, all with the same offsets

`present` [n] is False for rows whose value is missing; it is None if no value is missing. Missing values are always
explicit, never a NaN or a magic number. If the value of a row is missing, the row's entry in `values` is undefined.
Decided: strings are stored as codes into a dictionary, so that work on text is done once per string of the dictionary
and not once per row. Kernels must not rely on the order of the dictionary. The dictionary may hold strings that no row
uses, and it may hold the same string twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tackboard.features.types import FeatureType

DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "int": np.int64,
    "float": np.float64,
    "string": np.int64,
    "id": np.int64,
    "time": np.int64,
    "vector": np.float32,
}
Mask = NDArray[np.bool_]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Column:
    """Holds the values of one feature, as the table at the top of this module shows. Treat a column as immutable."""

    type: FeatureType
    values: NDArray[Any]
    _: dataclasses.KW_ONLY
    present: Mask | None = None
    offsets: NDArray[np.int64] | None = None
    dictionary: NDArray[np.object_] | None = None
    fields: Mapping[str, Column] | None = None

    def __len__(self) -> int:
        if self.fields is not None:
            return len(next(iter(self.fields.values())))
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Column({self.type}, {len(self)} rows)"

    @property
    def mask(self) -> Mask:
        """The array `present`, or an array of True if `present` is None."""
        return np.ones(len(self), dtype=np.bool_) if self.present is None else self.present

    def take(self, indices: NDArray[np.int64]) -> Column:
        """Returns the rows at `indices`, in that order; an index may occur more than once."""
        present = None if self.present is None else self.present.take(indices)
        if self.fields is not None:
            fields = {name: field.take(indices) for name, field in self.fields.items()}
            return Column(self.type, self.values, present=present, fields=fields)
        if self.offsets is None:
            # `take` gathers rows of vectors four times faster than indexing.
            return Column(self.type, self.values.take(indices, axis=0), present=present, dictionary=self.dictionary)
        starts, lengths = self.offsets[indices], self.offsets[indices + 1] - self.offsets[indices]
        return Column(
            self.type,
            self.values[ranges(starts, lengths)],
            present=present,
            offsets=offsets_of(lengths),
            dictionary=self.dictionary,
        )

    def flat(self) -> Column:
        """Returns the elements of a list column as a scalar column."""
        return Column(self.type.of_elements(), self.values, dictionary=self.dictionary)

    def texts(self) -> NDArray[np.object_]:
        """Returns the string of every value of a string column. For a missing row, the string is arbitrary."""
        assert self.dictionary is not None
        if len(self.dictionary) == 0:
            return np.full(len(self.values), "", dtype=np.object_)
        return self.dictionary.take(self.values, mode="clip")

    def to_pylist(self) -> list[Any]:
        """Returns a plain Python value per row: None if missing, a list for a list, a dict of lists for a sequence."""
        if self.fields is not None:
            lists = {name: field.to_pylist() for name, field in self.fields.items()}
            rows: list[Any] = [{name: lists[name][row] for name in lists} for row in range(len(self))]
        else:
            flat = self.values.tolist() if self.dictionary is None else [str(text) for text in self.texts()]
            if self.offsets is None:
                rows = flat
            else:
                rows = [flat[self.offsets[row] : self.offsets[row + 1]] for row in range(len(self))]
        return rows if self.present is None else [v if p else None for v, p in zip(rows, self.present, strict=True)]

    @classmethod
    def of(cls, type: FeatureType, values: Sequence[Any]) -> Column:
        """Makes a column from plain Python values (the inverse of `to_pylist`). Use this method only for small data."""
        missing = [value is None for value in values]
        present = np.array([not absent for absent in missing], dtype=np.bool_) if any(missing) else None
        if type.kind == "sequence":
            fields = {
                name: cls.of(column, [row[name] if row is not None else [] for row in values])
                for name, column in type.columns
            }
            return cls(type, np.zeros(0), present=present, fields=fields)
        if type.kind == "list":
            rows = [() if row is None else row for row in values]
            flat = cls.of(type.of_elements(), [value for row in rows for value in row])
            lengths = np.array([len(row) for row in rows], dtype=np.int64)
            return cls(type, flat.values, present=present, offsets=offsets_of(lengths), dictionary=flat.dictionary)
        if type.kind == "vector":
            rows = [[0.0] * type.width if row is None else row for row in values]
            return cls(type, np.array(rows, dtype=np.float32).reshape(len(rows), type.width), present=present)
        if type.kind == "string":
            codes, dictionary = encode_strings(["" if value is None else value for value in values])
            return cls(type, codes, present=present, dictionary=dictionary)
        filled = [0 if value is None else value for value in values]
        return cls(type, np.array(filled, dtype=DTYPES[type.kind]), present=present)


def encode_strings(values: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.object_]]:
    """Returns (codes, dictionary) of strings. The dictionary holds each string once, in order of appearance."""
    known: dict[str, int] = {}
    codes = np.fromiter((known.setdefault(value, len(known)) for value in values), dtype=np.int64, count=len(values))
    dictionary = np.empty(len(known), dtype=np.object_)
    dictionary[:] = list(known)
    return codes, dictionary


def sequence_column(lengths: NDArray[np.int64], **columns: Column) -> Column:
    """Turns parallel scalar columns into one sequence column. The lists of row i have `lengths[i]` elements."""
    offsets = offsets_of(lengths)
    fields = {
        name: Column(column.type.in_list(), column.values, offsets=offsets, dictionary=column.dictionary)
        for name, column in columns.items()
    }
    type_ = FeatureType("sequence", columns=tuple((name, field.type) for name, field in fields.items()))
    return Column(type_, np.zeros(0), fields=fields)


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the offsets of lists of these lengths, laid end to end: each list's start, then the last list's end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the indices start, start + 1, …, start + length - 1 of every (start, length), concatenated."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int64)
    ends = np.cumsum(lengths)
    indices = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    indices += (starts - ends + lengths).repeat(lengths)
    return indices


def ordered_sum(values: NDArray[np.float64], rows: NDArray[np.int64], num_rows: int) -> NDArray[np.float64]:
    """Returns the sum of the values of each row [num_rows]. `rows` holds the row of each value.

    Each sum starts at 0.0, and the values are added one after the other in the given order. Kernels must use this
    function to sum the floats of a row. Only kernels/vectors.py has its own code, which adds the components of a vector
    in their order. NumPy's `sum` adds in pairs, in an order that depends on the shape of the whole array,
    so a row's sum in a batch could differ in its last bits from the sum of the row alone.
    """
    return np.asarray(np.bincount(rows, weights=values, minlength=num_rows), dtype=np.float64)


def join_columns(parts: Sequence[Column]) -> Column:
    """Concatenates columns of the same type."""
    first = parts[0]
    if len(parts) == 1:
        return first
    present = None
    if any(part.present is not None for part in parts):
        present = np.concatenate([part.mask for part in parts])
    if first.fields is not None:
        fields = {name: join_columns([part.fields[name] for part in parts if part.fields]) for name in first.fields}
        return Column(first.type, first.values, present=present, fields=fields)
    dictionary = None
    values = [part.values for part in parts]
    if first.dictionary is not None:
        texts = [part.dictionary for part in parts if part.dictionary is not None]
        dictionary = np.concatenate(texts)
        shift = offsets_of(np.array([len(text) for text in texts], dtype=np.int64))
        values = [codes + start for codes, start in zip(values, shift[:-1], strict=True)]
    offsets = None
    if first.offsets is not None:
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None]))
    return Column(first.type, np.concatenate(values), present=present, offsets=offsets, dictionary=dictionary)


def both_present(*columns: Column) -> Mask | None:
    """Returns a mask of the rows in which all `columns` are present, or None if nothing is missing. If a column has one
    row, its mask is broadcast."""
    masks = [column.present for column in columns if column.present is not None]
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask


@overload
def spread(mask: Mask, num_rows: int) -> Mask: ...


@overload
def spread(mask: Mask | None, num_rows: int) -> Mask | None: ...


def spread(mask: Mask | None, num_rows: int) -> Mask | None:
    """Repeats a mask of one row for `num_rows` rows. Returns any other mask, and None, unchanged."""
    return mask if mask is None or len(mask) == num_rows else np.broadcast_to(mask, (num_rows,))


def differing_rows(one: Column, other: Column) -> NDArray[np.int64]:
    """Returns the rows in which two columns differ in any bit. NaNs with equal bits are equal; -0.0 and 0.0 differ."""
    if len(one) != len(other):
        return np.arange(max(len(one), len(other)), dtype=np.int64)
    differ = one.mask != other.mask
    both = one.mask & other.mask
    if one.fields is not None and other.fields is not None:
        for name in sorted({*one.fields, *other.fields}):
            if name not in one.fields or name not in other.fields:
                return np.arange(len(one), dtype=np.int64)
            rows = differing_rows(one.fields[name], other.fields[name])
            differ[rows[both[rows]]] = True
        return np.flatnonzero(differ)
    if one.offsets is not None and other.offsets is not None:
        same_length = np.diff(one.offsets) == np.diff(other.offsets)
        differ |= both & ~same_length
        check = np.flatnonzero(both & same_length)
        lengths = np.diff(one.offsets)[check]
        left, right = ranges(one.offsets[check], lengths), ranges(other.offsets[check], lengths)
        unequal = bits(one.flat())[left] != bits(other.flat())[right]
        differ[np.repeat(check, lengths)[unequal]] = True
        return np.flatnonzero(differ)
    unequal = bits(one) != bits(other)
    if unequal.ndim == 2:
        unequal = unequal.any(axis=1)
    return np.flatnonzero(differ | (both & unequal))


def bits(column: Column) -> NDArray[Any]:
    """Returns the values of a scalar or vector column in a form in which `==` compares bit by bit."""
    if column.dictionary is not None:
        return column.texts()
    values = np.ascontiguousarray(column.values)
    integers = {np.dtype(np.float64): np.uint64, np.dtype(np.float32): np.uint32}
    return values.view(integers[values.dtype]) if values.dtype in integers else values
