"""Operators that compare values, combine bools and choose a value. All kernels except `if_else` return bools.

Two values can be compared if they are of one kind or are both numbers. `==` and `!=` also compare an id with an int.
Decided: to compare an int with a float, the int is converted to a 64-bit float, as in NumPy. Strings are equal if their
code points are equal, so composed and decomposed letters differ unless `.nfc()` is applied. `&` and `|` follow
three-valued logic: `False & missing` is False. Work on strings is done once per string of the dictionary. If there are
fewer rows than strings, only the strings that rows use are processed, because a catalogue's dictionary may be large.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import DTYPES, Column, Mask, spread
from tackboard.features.kernels.arithmetic import INT64_MAX, INT64_MIN, joined, promoted
from tackboard.features.kernels.text import per_text, text_keys, used_texts
from tackboard.features.operators import Example, Params, TypeClash, any_missing, register
from tackboard.features.types import BOOL, SCALARS, FeatureType

_register = functools.partial(register, family="comparison", elementwise=True)
ORDERED = ("bool", "int", "float", "time")


def in_one_dictionary(*columns: Column) -> tuple[NDArray[np.object_], list[NDArray[np.int64]]]:
    """Returns a dictionary with the strings of all `columns`, and the codes of each column in that dictionary."""
    first = columns[0].dictionary
    assert first is not None
    if len(first) and all(column.dictionary is first for column in columns):
        return first, [column.values for column in columns]
    parts = [used_texts(column) for column in columns]
    starts = np.cumsum([0, *(len(texts) for _, texts in parts[:-1])])
    codes = [codes + start for (codes, _), start in zip(parts, starts, strict=True)]
    return np.concatenate([texts for _, texts in parts]), codes


def need_constant(type_: FeatureType, value: Any) -> None:
    """Raises TypeClash if the parameter `value` is not a value of the scalar `type_`. An int is allowed for a float."""
    if type_.kind == "bool":
        allowed, fits = "True or False", isinstance(value, bool)
    elif type_.kind == "string":
        allowed, fits = "text in Unicode", isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    elif type_.kind == "float":
        allowed, fits = "a finite number", _is_int64(value) or (isinstance(value, float) and math.isfinite(value))
    else:
        unit = {"time": ", ms since 1970", "id": ", an id"}.get(type_.kind, "")
        allowed, fits = f"a whole number of 64 bits{unit}", _is_int64(value)
    if not fits:
        fix = "ids are numbers: apply this operator to the string, before hash_id()" if type_.kind == "id" else ""
        raise TypeClash(f"{str(value)[:40]!r} is not a value of type {type_}", allowed=f"it takes {allowed}", fix=fix)


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and INT64_MIN <= value <= INT64_MAX


def common_type(types: tuple[FeatureType, ...], kinds: tuple[str, ...] = SCALARS) -> FeatureType:
    """Returns a type for the values of all `types`. Raises TypeClash unless all are of one kind or all are numbers."""
    if all(type_.with_nullable(False) == types[0].with_nullable(False) for type_ in types) and types[0].kind in kinds:
        return types[0].with_nullable(False)
    if all(type_.is_number for type_ in types):
        return promoted(types)
    given = " and ".join(str(type_) for type_ in types)
    raise TypeClash(f"it is given {given}", allowed=f"it takes numbers, or values of one kind: {', '.join(kinds)}")


def _equality(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    kinds = {type_.kind for type_ in types}
    if kinds == {"id", "string"}:
        given = " and ".join(str(type_) for type_ in types)
        raise TypeClash(f"it is given {given}", allowed="it takes: id, int", fix="use hash_id() of the string")
    if kinds != {"id", "int"}:
        common_type(types)
    return BOOL.with_nullable(any_missing(types))


def _order(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if types[0].kind not in ORDERED or types[1].kind not in ORDERED:
        given = " and ".join(str(type_) for type_ in types)
        raise TypeClash(f"it is given {given}", allowed="it takes two numbers or two times")
    common_type(types)
    return BOOL.with_nullable(any_missing(types))


def _logic(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if any(type_.kind != "bool" for type_ in types):
        given = " and ".join(str(type_) for type_ in types)
        raise TypeClash(f"it is given {given}", allowed="it takes: bool", fix="for a number write (a != 0)")
    return BOOL.with_nullable(any_missing(types))


def _membership(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    kinds = ("int", "string", "id", "time")
    if types[0].kind not in kinds:
        raise TypeClash(f"it is given {types[0]}", allowed=f"it takes: {', '.join(kinds)}")
    values = params.get("values")
    if not isinstance(values, list | tuple):
        raise TypeClash(f"the values are {str(values)[:40]!r}", allowed="it takes a list")
    for value in values:
        need_constant(types[0], value)
    return BOOL.with_nullable(types[0].nullable)


def _choice(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if types[0].kind != "bool":
        raise TypeClash(f"the condition is {types[0]}", allowed="it takes: bool", fix="for a number write (a != 0)")
    return common_type(types[1:]).with_nullable(any_missing(types))


def _comparable(a: Column, b: Column) -> list[NDArray[Any]]:
    """Returns the values of both columns. Strings become numbers; equal strings become equal numbers."""
    return text_keys(a, b) if a.type.kind == "string" else [a.values, b.values]


@_register(
    "equal",
    "a == b",
    _equality,
    Example('x == "é"', [True, False, None], {"x": ("string?", ["\u00e9", "e\u0301", None])}),
    Example("x == 2**53", [True, False], {"x": ("float", [2.0**53, 0.5])}),
)
def equal(a: Column, b: Column) -> Column:
    """Whether two values are the same. If an int is compared with a float, the int becomes a float. NaN equals nothing,
    and 0.0 equals -0.0. Strings are compared by code points. An id equals an int with the same value. Missing if an
    input is missing."""
    return joined(BOOL, np.equal(*_comparable(a, b)), a, b)


@_register("not_equal", "a != b", _equality, Example("x != 7", [False, True, None], {"x": ("id?", [7, 8, None])}))
def not_equal(a: Column, b: Column) -> Column:
    """Whether two values differ: the opposite of `a == b`, so NaN differs from everything. Missing if an input is
    missing."""
    return joined(BOOL, np.not_equal(*_comparable(a, b)), a, b)


@_register("less", "a < b", _order, Example("x < 1.5", [True, False, None], {"x": ("int?", [1, 2, None])}))
def less(a: Column, b: Column) -> Column:
    """Whether the first of two numbers or times is smaller; False if either is NaN. If an int is compared with a float,
    the int becomes a float. Missing if an input is missing."""
    return joined(BOOL, np.less(a.values, b.values), a, b)


@_register("less_equal", "a <= b", _order, Example("x <= 0.0", [True, False], {"x": ("float", [-0.0, 0.1])}))
def less_equal(a: Column, b: Column) -> Column:
    """Whether the first of two numbers or times is smaller or equal; False for NaN. Missing if an input is missing."""
    return joined(BOOL, np.less_equal(a.values, b.values), a, b)


@_register(
    "greater", "a > b", _order, Example("x > y", [True, None], {"x": ("time", [10, 20]), "y": ("time?", [5, None])})
)
def greater(a: Column, b: Column) -> Column:
    """Whether the first of two numbers or times is greater; False for NaN. Missing if an input is missing."""
    return joined(BOOL, np.greater(a.values, b.values), a, b)


@_register("greater_equal", "a >= b", _order, Example("x >= 1", [True, False, None], {"x": ("int?", [1, 0, None])}))
def greater_equal(a: Column, b: Column) -> Column:
    """Whether the first of two numbers or times is greater or equal; False for NaN. Missing if an input is missing."""
    return joined(BOOL, np.greater_equal(a.values, b.values), a, b)


@_register(
    "and",
    "a & b",
    _logic,
    Example("x & y", [False, None, True], {"x": ("bool?", [None, None, True]), "y": ("bool", [False, True, True])}),
)
def logical_and(a: Column, b: Column) -> Column:
    """Whether both inputs are true. If either is False, the result is False, even if the other is missing. Otherwise
    the result is missing if an input is missing."""
    values = a.values & b.values
    return Column(BOOL, values, present=_decided(a, b, ~a.values, ~b.values, len(values)))


@_register(
    "or",
    "a | b",
    _logic,
    Example("x | y", [True, None, False], {"x": ("bool?", [None, None, False]), "y": ("bool", [True, False, False])}),
)
def logical_or(a: Column, b: Column) -> Column:
    """Whether at least one of the two inputs is true. If either is True, the result is True, even if the other is
    missing. Otherwise the result is missing if an input is missing."""
    values = a.values | b.values
    return Column(BOOL, values, present=_decided(a, b, a.values, b.values, len(values)))


def _decided(a: Column, b: Column, by_a: Mask, by_b: Mask, num_rows: int) -> Mask | None:
    """Returns a mask of the rows with a result: both inputs are present, or one is present and decides the result."""
    if a.present is None and b.present is None:
        return None
    if a.present is None:
        present = by_a | b.mask
    elif b.present is None:
        present = by_b | a.present
    else:
        present = (a.present & b.present) | (a.present & by_a) | (b.present & by_b)
    return spread(present, num_rows)


@_register("not", "~a", _logic, Example("~x", [False, True, None], {"x": ("bool?", [True, False, None])}))
def logical_not(a: Column) -> Column:
    """The opposite of a bool. Missing stays missing."""
    return joined(BOOL, ~a.values, a)


@_register(
    "is_in",
    "a.is_in(values)",
    _membership,
    Example('x.is_in(["a", "b"])', [True, False, None], {"x": ("string?", ["b", "c", None])}),
    Example("x.is_in([])", [False], {"x": ("int", [1])}),
)
def is_in(a: Column, *, values: list[Any]) -> Column:
    """Whether the value is in a list of constants. Strings are compared by code points; for int, id and time (ms) the
    constants are whole numbers. False for an empty list. Missing stays missing."""
    if a.type.kind == "string":
        return joined(BOOL, per_text(a, set(values).__contains__, np.bool_), a)
    if not values:
        return joined(BOOL, np.zeros(len(a.values), dtype=np.bool_), a)
    table = np.sort(np.array(values, dtype=np.int64))
    return joined(BOOL, table.take(table.searchsorted(a.values), mode="clip") == a.values, a)


@_register(
    "if_else",
    "if_else(condition, a, b)",
    _choice,
    Example("if_else(x > 0, x, 0.5)", [3.0, 0.5, None], {"x": ("int?", [3, -3, None])}),
)
def if_else(condition: Column, a: Column, b: Column) -> Column:
    """`a` if the condition is true, else `b`. `a` and `b` must be two numbers or have the same kind. If one of two
    numbers is a float, the result is a float; a bool and an int give an int. Missing if the condition or the chosen
    value is missing; the other value does not matter."""
    type_ = common_type((a.type, b.type))
    if type_.kind == "string":
        dictionary, (left, right) = in_one_dictionary(a, b)
    else:
        dictionary, left, right = None, a.values, b.values
    values = np.where(condition.values, left, right).astype(DTYPES[type_.kind], copy=False)
    present = condition.present
    if a.present is not None or b.present is not None:
        chosen = np.where(condition.values, *(True if c.present is None else c.present for c in (a, b)))
        present = chosen if present is None else present & chosen
    return Column(type_, values, present=spread(present, len(values)), dictionary=dictionary)
