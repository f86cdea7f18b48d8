"""Arithmetic on numbers: the kernels take columns of bool, int or float and return columns of int or float.

Decided: a bool counts as 0 or 1. Ints are 64 bits wide and wrap around, as NumPy's do, because a check for overflow
would cost more than the sum itself. If an input is a float, the result is a float. If no input is missing, only `//`
and `%` can give a missing value. Every NaN that a sum or product gives has the same bits, see `one_nan`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column, Mask, both_present, spread
from tackboard.features.operators import Example, Params, TypeClash, any_missing, need, register
from tackboard.features.types import FLOAT, INT, NUMBERS, FeatureType

_register = functools.partial(register, family="arithmetic", elementwise=True)
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
_FIXES = {
    "time": "for the seconds between two times write a.seconds_since(b)",
    "string": "to join strings write concat(a, b)",
    "id": "an id is a name and cannot be calculated with",
}


def one_nan(values: NDArray[Any]) -> NDArray[Any]:
    """Gives every NaN in `values` the bits of np.nan. Changes `values` in place, so nothing else may use this array.

    The sum or product of two NaNs has the bits of one of them. NumPy's choice between the two depends on their position
    in the array and on whether an input has one row. Without this function, a row computed alone could differ from the
    same row computed in a batch.
    """
    nan = np.isnan(values)
    if nan.any():
        values[nan] = np.nan
    return values


def whole(column: Column) -> NDArray[Any]:
    """Returns the values of a column of numbers. Bools become int64, because NumPy's `+` of two bools is an `or`."""
    return column.values.astype(np.int64) if column.type.kind == "bool" else column.values


def joined(type_: FeatureType, values: NDArray[Any], *columns: Column) -> Column:
    """Returns a column of `values` that is missing in every row in which one of `columns` is missing."""
    return Column(type_, values, present=spread(both_present(*columns), len(values)))


def promoted(types: tuple[FeatureType, ...]) -> FeatureType:
    """Returns the type that can hold all these numbers: float if one of them is a float, else int."""
    return FLOAT if any(type_.kind == "float" for type_ in types) else INT


def need_numbers(types: tuple[FeatureType, ...], kinds: tuple[str, ...] = NUMBERS) -> None:
    """Raises TypeClash, with a suggestion, if the kind of one of `types` is not among `kinds`."""
    for type_ in types:
        if type_.kind not in kinds:
            given = " and ".join(str(one) for one in types)
            # Suggestions to join or to subtract inputs make no sense for a single input.
            fix = _FIXES.get(type_.kind, "") if len(types) > 1 or type_.kind == "id" else ""
            raise TypeClash(f"it is given {given}", allowed=f"it takes: {', '.join(kinds)}", fix=fix)


def _promoting(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    need_numbers(types)
    return promoted(types).with_nullable(any_missing(types))


def to_float(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    """The type rule of operators that take numbers and give a float."""
    need_numbers(types)
    return FLOAT.with_nullable(any_missing(types))


def _whole_division(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if any(type_.kind == "float" for type_ in types):
        given = " and ".join(str(type_) for type_ in types)
        raise TypeClash(f"it is given {given}", allowed="it takes: bool, int", fix="for floats write (a / b).floor()")
    need_numbers(types, ("bool", "int"))
    return INT.with_nullable(True)


def _same_number(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return need(types, 0, ("int", "float"))


@_register(
    "add",
    "a + b",
    _promoting,
    Example("x + y", [None, -(2**63)], {"x": ("int", [1, 2**63 - 1]), "y": ("int?", [None, 1])}),
    Example("x + 0.5", [1.5, 0.5], {"x": ("bool", [True, False])}),
)
def add(a: Column, b: Column) -> Column:
    """The sum of two numbers. A bool counts as 0 or 1. Ints are 64 bits wide and wrap around. If one of the two is a
    float, the result is a float. Missing if an input is missing."""
    values = np.add(whole(a), whole(b))
    return joined(INT, values, a, b) if values.dtype == np.int64 else joined(FLOAT, one_nan(values), a, b)


@_register(
    "subtract", "a - b", _promoting, Example("x - y", [4.5, None], {"x": ("int", [5, 5]), "y": ("float?", [0.5, None])})
)
def subtract(a: Column, b: Column) -> Column:
    """The difference of two numbers. The result has the same type as `a + b`. Ints wrap around. Missing if an input is
    missing. For two times see `a.seconds_since(b)`."""
    values = np.subtract(whole(a), whole(b))
    return joined(INT if values.dtype == np.int64 else FLOAT, values, a, b)


@_register(
    "multiply",
    "a * b",
    _promoting,
    Example("x * y", [2.5, 0.0], {"x": ("bool", [True, False]), "y": ("float", [2.5, 2.5])}),
)
def multiply(a: Column, b: Column) -> Column:
    """The product of two numbers, with the same type as `a + b`. Ints wrap around. Missing if an input is missing."""
    values = np.multiply(whole(a), whole(b))
    return joined(INT, values, a, b) if values.dtype == np.int64 else joined(FLOAT, one_nan(values), a, b)


@_register(
    "divide",
    "a / b",
    to_float,
    Example("x / y", [0.25, None], {"x": ("int", [1, 1]), "y": ("int?", [4, None])}),
    Example("x / 0.0", [math.inf, -math.inf], {"x": ("float", [1.0, -1.0])}),
)
def divide(a: Column, b: Column) -> Column:
    """The quotient of two numbers, always a float. Division by zero gives inf, -inf or NaN, as IEEE 754 says; write
    `(a / b).finite()` to make these values missing. Missing if an input is missing."""
    return joined(FLOAT, np.true_divide(whole(a), whole(b)), a, b)


@_register(
    "floor_divide",
    "a // b",
    _whole_division,
    Example("x // y", [3, -4, None], {"x": ("int", [7, -7, 7]), "y": ("int", [2, 2, 0])}),
)
def floor_divide(a: Column, b: Column) -> Column:
    """The quotient of two ints, rounded down as in Python. The smallest int divided by -1 wraps around to itself.
    Missing if the divisor is 0 or an input is missing."""
    return joined_nonzero(np.floor_divide(whole(a), whole(b)), a, b)


@_register(
    "modulo",
    "a % b",
    _whole_division,
    Example("x % y", [1, 2, None], {"x": ("int", [7, -7, 7]), "y": ("int", [3, 3, 0])}),
)
def modulo(a: Column, b: Column) -> Column:
    """The remainder of `a // b`, with the sign of the divisor, as in Python. Missing if the divisor is 0 or an input is
    missing."""
    return joined_nonzero(np.remainder(whole(a), whole(b)), a, b)


def joined_nonzero(values: NDArray[Any], a: Column, b: Column) -> Column:
    """Returns an int column of `values` that is missing in every row in which `a` or `b` is missing or `b` is 0."""
    present: Mask | None = both_present(a, b)
    nonzero: Mask = b.values != 0
    if not nonzero.all():
        present = nonzero if present is None else present & nonzero
    return Column(INT, values, present=spread(present, len(values)))


@_register("negate", "-a", _promoting, Example("-x", [-3, -(2**63), None], {"x": ("int?", [3, -(2**63), None])}))
def negate(a: Column) -> Column:
    """The number with the opposite sign. The smallest int wraps around to itself; a bool gives 0 or -1. Missing stays
    missing."""
    return joined(promoted((a.type,)), np.negative(whole(a)), a)


@_register("absolute", "a.abs()", _same_number, Example("x.abs()", [2.5, None], {"x": ("float?", [-2.5, None])}))
def absolute(a: Column) -> Column:
    """The absolute value of a number. The smallest int has no positive counterpart and stays as it is. Missing stays
    missing."""
    return joined(promoted((a.type,)), np.absolute(a.values), a)


@_register(
    "floor", "a.floor()", _same_number, Example("x.floor()", [2.0, -3.0, None], {"x": ("float?", [2.7, -2.2, None])})
)
def floor(a: Column) -> Column:
    """The number rounded down to a whole number. A float stays a float; an int, NaN and ±inf are unchanged. Missing
    stays missing."""
    return joined(promoted((a.type,)), np.floor(a.values) if a.type.kind == "float" else a.values, a)
