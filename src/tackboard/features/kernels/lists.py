"""Operators on lists: length, elements, distinct elements, common elements, sums and differences.

The kernels take list columns (flat values and offsets); some also take a vector, a string or a scalar. They return one
value or one list per row.

Decided: no kernel loops over rows; all work is done on the flat values of the jagged lists. Two floats are the same
element if they are equal as numbers (-0.0 is 0.0), with one exception: any two NaNs are the same element, because users
expect a list of three NaNs to have one distinct element. Strings are compared by their text and not by their codes. In
`has` and `overlap`, a column with only one row is compared with every row of the other column, so a user's list need
not be copied for each item.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column, Mask, offsets_of, ordered_sum, ranges
from tackboard.features.kernels.arithmetic import joined, one_nan
from tackboard.features.kernels.text import per_text, text_keys
from tackboard.features.operators import Example, Params, TypeClash, TypeRule, any_missing, need, register
from tackboard.features.types import BOOL, FLOAT, INT, NUMBERS, SCALARS, FeatureType

LIMIT = 2**31
"""Positions and lengths that a feature gives as constants must be below this number."""
FEW = 12
"""Up to this number of keys, comparing values with each key in turn is faster than a binary search."""
Ints = NDArray[np.int64]
_register = functools.partial(register, family="lists")


def _tight(column: Column) -> tuple[Column, Ints]:
    """Drops values that belong to no list. Returns the list column and its offsets, which then begin at 0."""
    offsets = column.offsets
    if offsets is None:
        raise ValueError(f"{column!r} has no lists")
    first, last = offsets[0], offsets[-1]
    if first == 0 and last == len(column.values):
        return column, offsets
    moved = offsets - first
    values = column.values[first:last]
    return Column(column.type, values, present=column.present, offsets=moved, dictionary=column.dictionary), moved


def _rows(offsets: Ints) -> Ints:
    """Returns the row of each element."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _grouped(keys: Ints, rows: Ints, num_rows: int) -> Ints:
    """Returns the positions of the elements, sorted by (row, key). Elements with equal row and key keep their order."""
    order = np.argsort(keys, kind="stable")
    # Two stable sorts are faster than np.lexsort, and 16-bit integers are sorted in linear time.
    small = rows.astype(np.uint16) if num_rows <= 2**16 else rows
    return order[np.argsort(small[order], kind="stable")]


def _among(keys: Ints, pool: Ints) -> Mask:
    """Returns for each of `keys` whether it is in `pool`."""
    if len(pool) == 0:
        return np.zeros(len(keys), dtype=np.bool_)
    if len(pool) <= FEW:
        among: Mask = keys == pool[0]
        for key in pool[1:]:
            among |= keys == key
        return among
    pool = np.sort(pool)
    nearest: Ints = pool.take(np.searchsorted(pool, keys), mode="clip")
    found: Mask = nearest == keys
    return found


def _first_of_row(keys: Ints, rows: Ints, num_rows: int) -> Mask:
    """Returns for each key whether it is the first occurrence of that key in its row."""
    order = _grouped(keys, rows, num_rows)
    keys, rows = keys[order], rows[order]
    starts = np.ones(len(order), dtype=np.bool_)
    starts[1:] = (keys[1:] != keys[:-1]) | (rows[1:] != rows[:-1])
    first = np.zeros(len(order), dtype=np.bool_)
    first[order[starts]] = True
    return first


def _keys(*columns: Column) -> list[Ints]:
    """Returns one int64 key per value, for each of `columns`. Keys are equal if and only if the values are the same."""
    if columns[0].dictionary is not None:
        return text_keys(*columns)
    return [_number_keys(column.values) for column in columns]


def _number_keys(values: NDArray[Any]) -> Ints:
    if values.dtype != np.float64:
        return values.astype(np.int64, copy=False)
    return one_nan(values + 0.0).view(np.int64)  # -0.0 becomes 0.0


def _need_list(types: tuple[FeatureType, ...], position: int, elements: tuple[str, ...] = SCALARS) -> FeatureType:
    given = types[position]
    if given.kind != "list" or given.element not in elements:
        allowed = "a list" if elements == SCALARS else " or ".join(f"list[{element}]" for element in elements)
        raise TypeClash(f"it is given {given}", allowed=f"it takes: {allowed}")
    return given


def _whole_number(params: Params, name: str, low: int) -> int:
    value = params.get(name)
    if type(value) is not int or not low <= value < LIMIT:
        raise TypeClash(
            f"its {name} is {str(value)[:80]!r}", allowed=f"it takes a whole number from {low} to {LIMIT - 1}"
        )
    return value


def _from_list(result: FeatureType | None, elements: tuple[str, ...], *, missing_if_empty: bool = False) -> TypeRule:
    """Returns a type rule for one list whose elements have one of the kinds `elements`. The rule gives `result`, or the
    type of the elements if `result` is None."""

    def rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
        given = _need_list(types, 0, elements)
        return (result or given.of_elements()).with_nullable(missing_if_empty or given.nullable)

    return rule


def _length_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return INT.with_nullable(need(types, 0, ("list", "string")).nullable)


def _at_rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    given = need(types, 0, ("list", "vector"))
    index = _whole_number(params, "index", 1 - LIMIT)
    if given.kind == "list":
        return given.of_elements().with_nullable(True)
    if not -given.width <= index < given.width:
        raise TypeClash(f"{given} has no component {index}", allowed=f"it takes {-given.width} to {given.width - 1}")
    return FLOAT.with_nullable(given.nullable)


def _take_rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    _whole_number(params, "count", 0)
    return _need_list(types, 0)


def _same_list(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return _need_list(types, 0)


def _has_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    given = _need_list(types, 0)
    if types[1].kind != given.element:
        raise TypeClash(f"it looks for {types[1]} in {given}", allowed=f"it takes: {given.element}")
    return BOOL.with_nullable(any_missing(types))


def _overlap_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    left, right = _need_list(types, 0), _need_list(types, 1)
    if left.element != right.element:
        raise TypeClash(f"it is given {left} and {right}", allowed="it takes two lists of the same kind")
    return INT.with_nullable(any_missing(types))


def _sum_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    given = _need_list(types, 0, NUMBERS)
    return (FLOAT if given.element == "float" else INT).with_nullable(given.nullable)


def _differences_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    given = _need_list(types, 0, ("int", "float", "time"))
    return (given if given.element == "float" else INT.in_list()).with_nullable(given.nullable)


@_register(
    "length",
    "a.length()",
    _length_rule,
    Example("a.length()", [2, 0, None], {"a": ("list[int]?", [[5, 6], [], None])}),
    Example("a.length()", [4, 5], {"a": ("string", ["caf\u00e9", "cafe\u0301"])}),
)
def length(a: Column) -> Column:
    """The number of elements of a list, or of Unicode code points of a string. Missing stays missing."""
    if a.offsets is not None:
        return Column(INT, a.offsets[1:] - a.offsets[:-1], present=a.present)
    return Column(INT, per_text(a, len, np.int64), present=a.present)


@_register(
    "at",
    "a.at(index)",
    _at_rule,
    Example("a.at(-1)", [7, 8, None, None], {"a": ("list[int]?", [[5, 6, 7], [8], [], None])}),
    Example("a.at(1)", [1.5], {"a": ("vector[2]", [[0.5, 1.5]])}),
)
def at(a: Column, *, index: int) -> Column:
    """The element of a list, or the component of a vector, at position `index`: 0 is the first, -1 the last.

    Missing if the list or vector is missing, or if the list has no element at that position. For a vector, the position
    is checked before any data is read.
    """
    if a.offsets is None:
        return Column(FLOAT, a.values[:, index].astype(np.float64), present=a.present)
    starts, ends = a.offsets[:-1], a.offsets[1:]
    where = (starts if index >= 0 else ends) + index
    found: Mask = where < ends if index >= 0 else where >= starts
    if len(a.values) == 0:
        values = np.zeros(len(a), dtype=a.values.dtype)
    else:
        values = a.values.take(where, mode="clip")
    present = found if a.present is None else found & a.present
    return Column(a.type.of_elements(), values, present=present, dictionary=a.dictionary)


@_register(
    "take",
    "a.take(count)",
    _take_rule,
    Example("a.take(2)", [[5, 6], [8], [], None], {"a": ("list[int]?", [[5, 6, 7], [8], [], None])}),
)
def take(a: Column, *, count: int) -> Column:
    """The first `count` elements of a list, or all if there are fewer. Missing stays missing."""
    a, offsets = _tight(a)
    lengths = np.diff(offsets)
    if not (lengths > count).any():
        return a
    lengths = np.minimum(lengths, count)
    values = a.values[ranges(offsets[:-1], lengths)]
    return Column(a.type, values, present=a.present, offsets=offsets_of(lengths), dictionary=a.dictionary)


@_register(
    "distinct_list",
    "a.distinct()",
    _same_list,
    Example("a.distinct()", [["b", "a"], [], None], {"a": ("list[string]?", [["b", "a", "b"], [], None])}),
)
def distinct_list(a: Column) -> Column:
    """The list without repetitions, in the order of first appearance. Missing stays missing.

    Among floats, -0.0 and 0.0 are the same, and all NaNs are the same.
    """
    a, offsets = _tight(a)
    (keys,) = _keys(a)
    keep = _first_of_row(keys, _rows(offsets), len(a))
    kept_before = offsets_of(keep.astype(np.int64))
    return Column(a.type, a.values[keep], present=a.present, offsets=kept_before[offsets], dictionary=a.dictionary)


@_register(
    "has",
    "a.has(x)",
    _has_rule,
    Example(
        "a.has(x)",
        [True, False, False, None],
        {"a": ("list[id]", [[5, 6], [5, 6], [], [5]]), "x": ("id?", [6, 7, 7, None])},
    ),
    broadcasts=True,
)
def has(a: Column, b: Column) -> Column:
    """Whether `x` is among the elements of a list; false for an empty list. Missing if the list or `x` is missing.

    Among floats, -0.0 and 0.0 are the same, and all NaNs are the same.
    """
    a, offsets = _tight(a)
    keys, wanted = _keys(a, b)
    if len(a) == 1:
        # One list is compared with the values of all rows, for example a user's list with each of a thousand items.
        found = _among(wanted, keys)
    else:
        rows = _rows(offsets)
        found = np.zeros(len(a), dtype=np.bool_)
        found[rows[keys == (wanted if len(wanted) == 1 else wanted[rows])]] = True
    return joined(BOOL, found, a, b)


@_register(
    "overlap",
    "a.overlap(b)",
    _overlap_rule,
    Example(
        "a.overlap(b)", [2, None], {"a": ("list[int]", [[1, 2, 2, 3], [1]]), "b": ("list[int]?", [[2, 2, 3, 9], None])}
    ),
    broadcasts=True,
)
def overlap(a: Column, b: Column) -> Column:
    """The number of distinct elements that two lists have in common. Missing if either list is missing.

    Among floats, -0.0 and 0.0 are the same, and all NaNs are the same.
    """
    if len(b) != 1:
        a, b = b, a
    (a, a_offsets), (b, b_offsets) = _tight(a), _tight(b)
    a_keys, b_keys = _keys(a, b)
    rows = _rows(a_offsets)
    if len(b) == 1:
        common = np.flatnonzero(_among(a_keys, b_keys))
        rows = rows[common]
        rows = rows[_first_of_row(a_keys[common], rows, len(a))]
    else:
        keys, rows = np.concatenate([a_keys, b_keys]), np.concatenate([rows, _rows(b_offsets)])
        # After the sort, the equal elements of a row form a run in which the elements of `a` come before those of `b`.
        # So a run with elements of both lists has exactly one step from `a` to `b`, and stands for one common element.
        order = _grouped(keys, rows, len(a))
        keys, rows, from_b = keys[order], rows[order], order >= len(a_keys)
        rows = rows[1:][(keys[1:] == keys[:-1]) & (rows[1:] == rows[:-1]) & from_b[1:] & ~from_b[:-1]]
    counts = np.bincount(rows, minlength=len(a)).astype(np.int64, copy=False)
    return joined(INT, counts, a, b)


@_register(
    "list_sum",
    "a.sum()",
    _sum_rule,
    Example("a.sum()", [1.5, 0.0, None], {"a": ("list[float]?", [[0.5, 1.0], [], None])}),
    Example("a.sum()", [2], {"a": ("list[bool]", [[True, False, True]])}),
)
def list_sum(a: Column) -> Column:
    """The sum of a list of numbers; 0 for an empty list. Missing stays missing.

    Floats are added in the order of the list. Ints wrap around beyond 64 bits. A bool counts as 0 or 1.
    """
    a, offsets = _tight(a)
    if a.values.dtype == np.float64:
        return Column(FLOAT, ordered_sum(a.values, _rows(offsets), len(a)), present=a.present)
    # Differences of running sums are exact even if the running sums wrap around.
    running = offsets_of(a.values)
    return Column(INT, running[offsets[1:]] - running[offsets[:-1]], present=a.present)


@_register(
    "list_mean",
    "a.mean()",
    _from_list(FLOAT, NUMBERS, missing_if_empty=True),
    Example("a.mean()", [1.5, None, None], {"a": ("list[int]?", [[1, 2], [], None])}),
)
def list_mean(a: Column) -> Column:
    """The mean of a list of numbers, as a float. Missing if the list is empty or missing.

    Every element is converted to a float first, so the sum of ints cannot wrap around. The elements are added in the
    order of the list.
    """
    a, offsets = _tight(a)
    lengths = np.diff(offsets)
    means = ordered_sum(a.values.astype(np.float64, copy=False), _rows(offsets), len(a)) / lengths
    return Column(FLOAT, means, present=_not_empty(a, lengths))


def _not_empty(column: Column, lengths: Ints) -> Mask | None:
    filled = lengths > 0
    if column.present is not None:
        return filled & column.present
    return None if filled.all() else filled


@_register(
    "list_max",
    "a.max()",
    _from_list(None, (*NUMBERS, "time"), missing_if_empty=True),
    Example("a.max()", [3, None, None], {"a": ("list[int]?", [[1, 3, 2], [], None])}),
)
def list_max(a: Column) -> Column:
    """The largest element of a list of numbers or times; NaN if any element is NaN. -0.0 becomes 0.0. Missing if the
    list is empty or missing.
    """
    a, offsets = _tight(a)
    lengths = np.diff(offsets)
    largest = np.zeros(len(lengths), dtype=a.values.dtype)
    filled = lengths > 0
    if len(a.values):
        # Empty rows hold no values, so the values of a non-empty row end where those of the next non-empty row begin.
        largest[filled] = np.maximum.reduceat(a.values, offsets[:-1][filled])
    if largest.dtype == np.float64:
        # If both -0.0 and 0.0 occur, or several different NaNs, the result of `maximum` depends on the processor.
        largest = one_nan(largest + 0.0)
    return Column(a.type.of_elements(), largest, present=_not_empty(a, lengths))


@_register(
    "differences",
    "a.differences()",
    _differences_rule,
    Example(
        "a.differences()", [[0, 500, -300], [0], [], None], {"a": ("list[time]?", [[1000, 1500, 1200], [7], [], None])}
    ),
)
def differences(a: Column) -> Column:
    """The difference between each element of a list and the element before it; 0 for the first element. For times the
    difference is in ms. Ints and times wrap around beyond 64 bits. Missing stays missing."""
    a, offsets = _tight(a)
    values = np.zeros_like(a.values)
    np.subtract(a.values[1:], a.values[:-1], out=values[1:])
    starts = offsets[:-1]
    values[starts[starts < offsets[1:]]] = 0
    element = FLOAT if a.values.dtype == np.float64 else INT
    return Column(element.in_list(), values, present=a.present, offsets=offsets)
