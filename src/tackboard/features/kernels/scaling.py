"""Operators that scale numbers into a range that suits a model.

Decided: outside their domain the functions give the values of IEEE 754 (the log of 0 is -inf, the log of -1 is NaN).
`.finite()` makes these values missing. Kernels that compute with floats pass only contiguous arrays to NumPy, because
NumPy handles other arrays with different code, whose results differ in the last bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column
from tackboard.features.kernels.arithmetic import joined, need_numbers, to_float
from tackboard.features.kernels.comparison import need_constant
from tackboard.features.operators import Example, Params, TypeClash, any_missing, register
from tackboard.features.types import FLOAT, INT, FeatureType

_register = functools.partial(register, family="scaling", elementwise=True)


def _normalised(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    for name in ("mean", "std"):
        need_constant(FLOAT, params.get(name))
    if params["std"] <= 0:
        raise TypeClash(f"std is {params['std']}", allowed="it takes a std above 0")
    return to_float(types, params)


def _clipped(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    need_numbers(types)
    low, high = params.get("low"), params.get("high")
    bounds = [bound for bound in (low, high) if bound is not None]
    for bound in bounds:
        need_constant(FLOAT, bound)
    if not bounds:
        raise TypeClash("it is given neither low nor high", allowed="it takes one or both", fix="a.clip(0, None)")
    if bounds != sorted(bounds):
        raise TypeClash(f"low is {low} and high is {high}", allowed="low is at most high")
    return _clip_type(types[0], low, high).with_nullable(any_missing(types))


def _clip_type(given: FeatureType, low: float | None, high: float | None) -> FeatureType:
    return FLOAT if given.kind == "float" or isinstance(low, float) or isinstance(high, float) else INT


def _bucketized(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    need_numbers(types)
    boundaries = params.get("boundaries")
    if not isinstance(boundaries, list | tuple) or len(boundaries) == 0:
        raise TypeClash(f"the boundaries are {str(boundaries)[:40]!r}", allowed="it takes a list of numbers")
    for boundary in boundaries:
        need_constant(FLOAT, boundary)
    for left, right in itertools.pairwise(boundaries):
        if left >= right:
            raise TypeClash(f"boundary {right} follows {left}", allowed="each boundary is above the one before")
    return INT.with_nullable(any_missing(types))


def _floats(column: Column) -> NDArray[np.float64]:
    return np.ascontiguousarray(column.values, dtype=np.float64)


@_register("log", "a.log()", to_float, Example("x.log()", [0.0, -math.inf, None], {"x": ("float?", [1.0, 0.0, None])}))
def log(a: Column) -> Column:
    """The natural logarithm: -inf for 0, NaN for numbers below 0. Missing stays missing."""
    return joined(FLOAT, np.log(_floats(a)), a)


@_register("log1p", "a.log1p()", to_float, Example("x.log1p()", [0.0, -math.inf, None], {"x": ("int?", [0, -1, None])}))
def log1p(a: Column) -> Column:
    """The natural logarithm of 1 + a, the usual scale for counts and prices: -inf for -1, NaN for numbers below -1.
    Missing stays missing."""
    return joined(FLOAT, np.log1p(_floats(a)), a)


@_register(
    "exp", "a.exp()", to_float, Example("x.exp()", [1.0, math.inf, None], {"x": ("float?", [0.0, 1000.0, None])})
)
def exp(a: Column) -> Column:
    """e to the power of a; inf if the result is too large for a float. Missing stays missing."""
    return joined(FLOAT, np.exp(_floats(a)), a)


@_register("sqrt", "a.sqrt()", to_float, Example("x.sqrt()", [3.0, math.sqrt(2), None], {"x": ("int?", [9, 2, None])}))
def sqrt(a: Column) -> Column:
    """The square root; NaN for numbers below 0. Missing stays missing."""
    return joined(FLOAT, np.sqrt(_floats(a)), a)


@_register(
    "clip",
    "a.clip(low, high)",
    _clipped,
    Example("x.clip(0, 10)", [0, 5, 10, None], {"x": ("int?", [-5, 5, 50, None])}),
    Example("x.clip(None, 1.0)", [-math.inf, 1.0], {"x": ("float", [-math.inf, 7.0])}),
)
def clip(a: Column, *, low: float | None = None, high: float | None = None) -> Column:
    """The number, but `low` if it is below `low`, and `high` if it is above `high`. Either `low` or `high` may be None.
    An int with int bounds stays an int; otherwise the result is a float. NaN stays NaN, -0.0 is not below 0.0, and
    missing stays missing."""
    type_ = _clip_type(a.type, low, high)
    dtype = np.int64 if type_.kind == "int" else np.float64
    values = np.array(a.values, dtype=dtype)
    # np.clip is not used, because it may turn -0.0 into 0.0, or 0.0 into -0.0, if a bound is zero.
    if low is not None:
        np.copyto(values, dtype(low), where=values < dtype(low))
    if high is not None:
        np.copyto(values, dtype(high), where=values > dtype(high))
    return joined(type_, values, a)


@_register(
    "normalise",
    "a.normalise(mean=, std=)",
    _normalised,
    Example("x.normalise(mean=10, std=2)", [2.0, 0.0, None], {"x": ("int?", [14, 10, None])}),
)
def normalise(a: Column, *, mean: float, std: float) -> Column:
    """(a - mean) / std, with `std` above 0. `mean` and `std` are constants, because they belong to the feature and are
    not computed from the data at hand. Missing stays missing."""
    return joined(FLOAT, (_floats(a) - np.float64(mean)) / np.float64(std), a)


@_register(
    "bucketize",
    "a.bucketize(boundaries)",
    _bucketized,
    Example("x.bucketize([0, 10])", [0, 1, 2, None], {"x": ("float?", [-0.5, 0.0, 99.0, None])}),
    Example("x.bucketize([0, 10])", [2], {"x": ("float", [math.nan])}),
)
def bucketize(a: Column, *, boundaries: list[Any]) -> Column:
    """The number of boundaries that are less than or equal to the value, from 0 to len(boundaries). NaN gives
    len(boundaries). The boundaries must increase. Ints are compared with int boundaries exactly; otherwise all numbers
    are compared as floats. Missing stays missing."""
    dtype = np.int64 if all(isinstance(boundary, int) for boundary in boundaries) else np.float64
    return joined(INT, np.array(boundaries, dtype=dtype).searchsorted(a.values, side="right"), a)
