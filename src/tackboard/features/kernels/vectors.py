"""Operators on vectors of fixed width: dot product, length, cosine, and packing numbers into a vector.

The kernels take vector columns [n, width] of 32-bit floats (`pack` takes numbers). They return a float or a vector per
row.

Decided: everything is computed in 64 bits and summed in the order of the components. BLAS is never used, because its
order of summation depends on the shape of the whole array. A column with only one row is combined with every row of the
other column, so a user's vector is not copied for every item. Every NaN that `_dot` gives has the same bits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column, both_present, spread
from tackboard.features.kernels.arithmetic import joined, one_nan
from tackboard.features.operators import Example, Params, TypeClash, any_missing, gives, need, register
from tackboard.features.types import FLOAT, NUMBERS, FeatureType

BLOCK = 4096
_register = functools.partial(register, family="vectors", elementwise=True)


def _dot(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the dot products of two arrays of vectors. Each array has the shape [width, n] or [width, 1]."""
    products = left * right
    if products.shape[1] == 1:
        # The loop below does the same additions in the same order. Plain floats are faster than arrays of one number.
        one = functools.reduce(operator.add, products[:, 0].tolist(), 0.0)
        return np.array([math.nan if math.isnan(one) else one])
    total = products[0] + 0.0
    for component in products[1:]:
        total += component
    # The bits of the product of two NaNs depend on the position of the product in the array.
    return one_nan(total)


def _components(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns vectors [n, width] as 64-bit floats [width, n]. Sums are faster if each component is contiguous."""
    return np.ascontiguousarray(values.T, dtype=np.float64)


def _num_rows(*columns: Column) -> int:
    """Returns the number of rows of the result: the length of the columns with more or fewer rows than one, else 1."""
    return max((len(column) for column in columns if len(column) != 1), default=1)


def _blocks(*columns: Column) -> Iterator[tuple[slice, list[NDArray[np.float64]]]]:
    """Yields (rows, their `_components`) of each block of `BLOCK` rows. A block fits into the processor's cache."""
    num_rows = _num_rows(*columns)
    for start in range(0, num_rows, BLOCK):
        rows = slice(start, min(start + BLOCK, num_rows))
        yield rows, [_components(c.values if len(c) == 1 else c.values[rows]) for c in columns]


def _two_vectors(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if len(types) != 2:
        raise TypeClash(f"it is given {len(types)} values", allowed="it takes two vectors")
    left, right = need(types, 0, ("vector",)), need(types, 1, ("vector",))
    if left.width != right.width:
        raise TypeClash(f"it is given {left} and {right}", allowed="it takes two vectors of the same width")
    return FLOAT.with_nullable(any_missing(types))


def _same_vector(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return need(types, 0, ("vector",))


def _packed(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if not types:
        raise TypeClash("it is given nothing", allowed="it takes one number or more", fix="pack(a, b)")
    for position in range(len(types)):
        need(types, position, NUMBERS)
    return FeatureType("vector", width=len(types), nullable=any_missing(types))


@_register(
    "dot",
    "a.dot(b)",
    _two_vectors,
    Example(
        "a.dot(b)",
        [11.0, None],
        {"a": ("vector[2]", [[1.0, 2.0], [3.0, 4.0]]), "b": ("vector[2]?", [[10.0, 0.5], None])},
    ),
)
def dot(a: Column, b: Column) -> Column:
    """The dot product of two vectors of the same width, computed in 64 bits in the order of the components.

    Missing if either vector is missing.
    """
    result = np.empty(_num_rows(a, b))
    for rows, (left, right) in _blocks(a, b):
        result[rows] = _dot(left, right)
    return joined(FLOAT, result, a, b)


@_register(
    "norm",
    "a.norm()",
    gives(FLOAT, ("vector",)),
    Example("a.norm()", [5.0, 0.0, None], {"a": ("vector[2]?", [[3.0, -4.0], [0.0, 0.0], None])}),
)
def norm(a: Column) -> Column:
    """The Euclidean length of a vector. Missing stays missing."""
    result = np.empty(len(a))
    for rows, (wide,) in _blocks(a):
        result[rows] = np.sqrt(_dot(wide, wide))
    return Column(FLOAT, result, present=a.present)


@_register(
    "l2_normalise",
    "a.l2_normalise()",
    _same_vector,
    Example("a.l2_normalise()", [[0.0, 1.0], [0.0, 0.0]], {"a": ("vector[2]", [[0.0, 2.0], [0.0, 0.0]])}),
)
def l2_normalise(a: Column) -> Column:
    """The vector divided by its Euclidean length; a zero vector stays as it is. Missing stays missing.

    If a component is infinite, it becomes NaN and the finite components become zero.
    """
    wide = _components(a.values)
    length = np.sqrt(_dot(wide, wide))
    length[length == 0.0] = 1.0
    return Column(a.type, one_nan(wide / length).T.astype(np.float32, order="C"), present=a.present)


@_register(
    "cosine",
    "a.cosine(b)",
    _two_vectors,
    Example(
        "a.cosine(b)",
        [1.0, -1.0, 0.0],
        {
            "a": ("vector[2]", [[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]]),
            "b": ("vector[2]", [[5.0, 0.0], [-3.0, 0.0], [0.0, 0.0]]),
        },
    ),
)
def cosine(a: Column, b: Column, *squares: Column) -> Column:
    """The cosine of the angle between two vectors of the same width; 0.0 if either is a zero vector.

    Rounding may make the result exceed 1 by the last bit, but the cosine of a nonzero vector with itself is exactly 1.
    Missing if either vector is missing.
    """
    result = np.empty(_num_rows(a, b))
    # If `b` is a column of a table, folding.py computes b.dot(b) ahead of time and passes it as `squares`. Users cannot
    # pass `squares`.
    known = squares[0].values if squares else None
    for rows, (left, right) in _blocks(a, b):
        left_square = _dot(left, left)
        right_square = _dot(right, right) if known is None else known if len(known) == 1 else known[rows]
        # The code takes the root of the product and not the product of two roots, because sqrt(x * x) is exactly x.
        # Squares of 32-bit floats are far from the limits of 64 bits, so neither overflow nor underflow is possible.
        part = _dot(left, right) / np.sqrt(left_square * right_square)
        for square in (left_square, right_square):
            zero = square == 0.0
            if zero.any():
                part[spread(zero, len(part))] = 0.0
        result[rows] = part
    return joined(FLOAT, result, a, b)


@_register(
    "pack",
    "pack(a, b, ...)",
    _packed,
    Example(
        "pack(a, b, c)",
        [[0.5, 7.0, 1.0], None],
        {"a": ("float?", [0.5, None]), "b": ("int", [7, 8]), "c": ("bool", [True, False])},
    ),
    elementwise=False,
)
def pack(*columns: Column) -> Column:
    """A vector of the given numbers, in the given order, each rounded to 32 bits; false is 0 and true is 1.

    Missing if any number is missing. A number beyond the range of 32-bit floats becomes infinite.
    """
    values = np.empty((len(columns[0]), len(columns)), dtype=np.float32)
    for position, column in enumerate(columns):
        values[:, position] = column.values
    return Column(FeatureType("vector", width=len(columns)), values, present=both_present(*columns))
