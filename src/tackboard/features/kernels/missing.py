"""Operators that find, fill and make missing values.

Decided: these operators work on rows and never on the elements of a list, because elements are never missing. NaN is a
value; only `.finite()` makes it missing. A constant must be a value of the column's kind, so filling never changes that
kind.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import DTYPES, Column, Mask, offsets_of
from tackboard.features.kernels.comparison import common_type, in_one_dictionary, need_constant
from tackboard.features.kernels.text import per_text, used_texts
from tackboard.features.operators import Example, Params, TypeClash, need, register
from tackboard.features.types import BOOL, FLOAT, KINDS, SCALARS, FeatureType

_register = functools.partial(register, family="missing values")
FLOAT32_MAX = float(np.finfo(np.float32).max)


def _any_kind(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    need(types, 0, tuple(kind for kind in KINDS if kind != "view"))
    return BOOL


def _filling(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    given = need(types, 0, (*SCALARS, "vector", "list"))
    value = params.get("value")
    if given.kind == "list":
        if not isinstance(value, list | tuple) or len(value) > 0:
            raise TypeClash(f"{str(value)[:40]!r} is not a value of type {given}", allowed="a list is filled with []")
    elif given.kind == "vector":
        need_constant(FLOAT, value)
        if not isinstance(value, int | float) or math.fabs(value) > FLOAT32_MAX:
            raise TypeClash(f"{value} is not a value of type {given}", allowed=f"at most {FLOAT32_MAX}, a 32-bit float")
    else:
        need_constant(given.with_nullable(False), value)
    return given.with_nullable(False)


def _first_present(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    if len(types) < 2:
        raise TypeClash(f"it is given {len(types)} value", allowed="it takes two or more", fix="coalesce(a, b)")
    return common_type(types, (*SCALARS, "vector")).with_nullable(all(type_.nullable for type_ in types))


def _unless_value(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    given = need(types, 0, SCALARS)
    need_constant(given.with_nullable(False), params.get("value"))
    return given.with_nullable(True)


def _unless_infinite(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return need(types, 0, ("float",)).with_nullable(True)


@_register(
    "is_missing", "a.is_missing()", _any_kind, Example("x.is_missing()", [False, True], {"x": ("string?", ["", None])})
)
def is_missing(a: Column) -> Column:
    """Whether a value of any kind is missing. NaN, an empty string and an empty list are not missing. The result itself
    is never missing."""
    return Column(BOOL, np.zeros(len(a), dtype=np.bool_) if a.present is None else ~a.present)


@_register(
    "fill_missing",
    "a.fill_missing(value)",
    _filling,
    Example("x.fill_missing(0.5)", [1.0, 0.5], {"x": ("float?", [1.0, None])}),
    Example("x.fill_missing(0)", [[1.0, 2.0], [0.0, 0.0]], {"x": ("vector[2]?", [[1.0, 2.0], None])}),
    Example("x.fill_missing([])", [[1], []], {"x": ("list[int]?", [[1], None])}),
)
def fill_missing(a: Column, *, value: Any) -> Column:
    """The value, or a constant of the same kind if the value is missing. The constant is text for a string, a whole
    number for int, id and time (ms), one number for all components of a vector, and [] for a list. NaN stays NaN. The
    result is never missing."""
    type_ = a.type.with_nullable(False)
    if a.present is None or (len(a.present) == 1 and a.present[0]):
        return Column(type_, a.values, offsets=a.offsets, dictionary=a.dictionary)
    if a.offsets is not None:
        lengths = np.diff(a.offsets)
        # A missing row of a list column may hold elements, but the values of these elements are undefined.
        keep = np.repeat(a.present, lengths)
        values = a.values[a.offsets[0] : a.offsets[-1]][keep]
        return Column(type_, values, offsets=offsets_of(lengths * a.present), dictionary=a.dictionary)
    if a.dictionary is not None:
        codes, texts = used_texts(a)
        dictionary = np.append(texts, np.array([value], dtype=np.object_))
        return Column(type_, np.where(a.present, codes, len(texts)), dictionary=dictionary)
    if type_.kind == "vector":
        return Column(type_, np.where(a.present[:, None], a.values, DTYPES["vector"](value)))
    values = a.values.copy()
    np.putmask(values, ~a.present, DTYPES[type_.kind](value))
    return Column(type_, values)


@_register(
    "coalesce",
    "coalesce(a, b, ...)",
    _first_present,
    Example("coalesce(x, y, 0.5)", [1.0, 8.0, 0.5], {"x": ("int?", [1, None, None]), "y": ("int?", [7, 8, None])}),
)
def coalesce(*columns: Column) -> Column:
    """The first value that is not missing. All values must be numbers, scalars of the same kind, or vectors of the same
    width. Numbers of different kinds give a float if any is a float, else an int. Missing if all values are missing."""
    type_ = common_type(tuple(column.type for column in columns), (*SCALARS, "vector"))
    dictionary = None
    parts: list[NDArray[Any]] = [column.values for column in columns]
    if type_.kind == "string":
        dictionary, codes = in_one_dictionary(*columns)
        parts = [*codes]
    values, present = parts[0], columns[0].present
    for column, part in zip(columns[1:], parts[1:], strict=True):
        if present is None:
            break
        values = np.where(present[:, None] if type_.kind == "vector" else present, values, part)
        present = None if column.present is None else present | column.present
    return Column(type_, values.astype(DTYPES[type_.kind], copy=False), present=present, dictionary=dictionary)


@_register(
    "missing_if",
    "a.missing_if(value)",
    _unless_value,
    Example("x.missing_if(-1)", [3, None], {"x": ("int", [3, -1])}),
    Example('x.missing_if("")', ["a", None, None], {"x": ("string?", ["a", "", None])}),
)
def missing_if(a: Column, *, value: Any) -> Column:
    """The value, but missing if it equals a constant of the same kind. This is for data that writes -1 or "" for
    unknown values. -0.0 equals 0.0. Missing stays missing."""
    if a.dictionary is not None:
        keep: Mask = per_text(a, lambda text: text != value, np.bool_)
    else:
        keep = a.values != DTYPES[a.type.kind](value)
    return _kept(a, keep)


@_register(
    "finite",
    "a.finite()",
    _unless_infinite,
    Example("(x / y).finite()", [0.5, None], {"x": ("int", [1, 1]), "y": ("int", [2, 0])}),
    Example("x.finite()", [None, 1.5, None], {"x": ("float?", [float("nan"), 1.5, None])}),
)
def finite(a: Column) -> Column:
    """The float, but missing if it is NaN, inf or -inf. Missing stays missing."""
    return _kept(a, np.isfinite(a.values))


def _kept(a: Column, keep: Mask) -> Column:
    """Returns a column like `a` in which rows with `keep` = False are missing."""
    present = keep if a.present is None else a.present & keep
    return Column(a.type.with_nullable(True), a.values, present=present, dictionary=a.dictionary)
