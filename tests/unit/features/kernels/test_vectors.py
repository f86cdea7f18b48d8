"""Vector kernels against plain Python, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tackboard.features.kernels.vectors  # noqa: F401
from tackboard.features.column import Column, differing_rows
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, INT, STRING, FeatureType

FLOATS32 = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -math.nan, 3e38, 1e-45]
)
FAST = settings(max_examples=80, deadline=None)


def compute(name: str, *columns: Column, **params: Any) -> Column:
    """The kernel's result, after checks: each row alone gives the same bits, and the rule foretells the type."""
    operator = REGISTRY[name]
    foretold = operator.rule(tuple(column.type for column in columns), params)
    with np.errstate(all="ignore"):
        whole: Column = operator.kernel(*columns, **params)
        for row in range(len(whole)):
            alone = operator.kernel(*(column.take(np.array([row])) for column in columns), **params)
            assert not len(differing_rows(alone, whole.take(np.array([row]))))
    assert whole.type.with_nullable(False) == foretold.with_nullable(False)
    assert foretold.nullable or whole.mask.all()
    return whole


def same(got: list[Any], wanted: list[Any]) -> bool:
    """Equal to the bit, NaNs apart, which are all the same here."""
    return repr(got).replace("-nan", "nan") == repr(wanted).replace("-nan", "nan")


def vectors(rows: list[list[float]], present: list[bool] | None = None) -> Column:
    kind = FeatureType("vector", width=len(rows[0]), nullable=present is not None)
    values = np.array(rows, dtype=np.float32)
    return Column(kind, values, present=None if present is None else np.array(present))


def plain_dot(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def plain_cosine(a: list[float], b: list[float]) -> float:
    if not any(a) or not any(b):
        return 0.0
    return plain_dot(a, b) / math.sqrt(plain_dot(a, a) * plain_dot(b, b))


def plain_normalise(a: list[float]) -> list[float]:
    length = math.sqrt(plain_dot(a, a)) if any(a) else 1.0
    return [float(np.float32(x / length)) for x in a]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Column, Column]:
    width, num_rows = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    rows = st.lists(st.lists(FLOATS32, min_size=width, max_size=width), min_size=num_rows, max_size=num_rows)
    masks = st.none() | st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)
    return vectors(draw(rows), draw(masks)), vectors(draw(rows), draw(masks))


@FAST
@given(pairs())
def test_against_plain_python(pair: tuple[Column, Column]) -> None:
    a, b = pair
    visible = list(zip(a.to_pylist(), b.to_pylist(), strict=True))
    for name, plain in (("dot", plain_dot), ("cosine", plain_cosine)):
        wanted = [None if x is None or y is None else plain(x, y) for x, y in visible]
        assert same(compute(name, a, b).to_pylist(), wanted)
    norms = [None if x is None else math.sqrt(plain_dot(x, x)) for x, _ in visible]
    assert same(compute("norm", a).to_pylist(), norms)
    assert same(compute("l2_normalise", a).to_pylist(), [None if x is None else plain_normalise(x) for x, _ in visible])


@pytest.mark.parametrize("name", ["dot", "cosine"])
@pytest.mark.parametrize("mask", [None, [True], [False]])
def test_one_row_spreads(name: str, mask: list[bool] | None) -> None:
    many = vectors(np.random.default_rng(1).normal(size=(50, 7)).tolist(), [row % 3 > 0 for row in range(50)])
    one = vectors([[0.5, -1.0, 2.0, 0.1, 0.2, 0.3, 0.4]], mask)
    spread = one.take(np.zeros(50, dtype=np.int64))
    kernel = REGISTRY[name].kernel
    assert not len(differing_rows(kernel(one, many), compute(name, spread, many)))
    assert not len(differing_rows(kernel(many, one), compute(name, many, spread)))


def test_bits_do_not_depend_on_the_length_of_the_column() -> None:
    random = np.random.default_rng(2)
    values = random.normal(size=(300, 16)).astype(np.float32)
    values[random.random(values.shape) < 0.02] = np.nan
    values[random.random(values.shape) < 0.02] = -np.inf
    column = vectors(values.tolist())
    other = vectors(values[::-1].tolist())
    for name in ("dot", "cosine"):
        compute(name, column, other)
    for name in ("norm", "l2_normalise"):
        compute(name, column)


def test_no_rows_and_edges() -> None:
    empty = Column(FeatureType("vector", width=3), np.zeros((0, 3), dtype=np.float32))
    for name in ("dot", "cosine"):
        assert compute(name, empty, empty).values.dtype == np.float64
    assert compute("norm", empty).values.dtype == np.float64
    assert compute("l2_normalise", empty).values.shape == (0, 3)
    tiny = vectors([[1e-45, 0.0], [3e38, 3e38]])
    assert compute("cosine", tiny, tiny).to_pylist() == [1.0, 1.0]
    assert str(compute("l2_normalise", vectors([[-0.0, 0.0]])).to_pylist()) == "[[-0.0, 0.0]]"


@FAST
@given(st.lists(st.tuples(st.none() | st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans()), max_size=12))
def test_pack(rows: list[tuple[float | None, int, bool]]) -> None:
    columns = [
        Column.of(FLOAT.with_nullable(True), [row[0] for row in rows]),
        Column.of(INT, [row[1] for row in rows]),
        Column.of(BOOL, [row[2] for row in rows]),
    ]
    with np.errstate(all="ignore"):
        wanted = [None if x is None else [float(np.float32(v)) for v in (x, np.int64(i), b)] for x, i, b in rows]
    assert same(compute("pack", *columns).to_pylist(), wanted)


def test_wrong_types() -> None:
    two, three = FeatureType("vector", width=2), FeatureType("vector", width=3)
    for name in ("dot", "cosine"):
        with pytest.raises(TypeClash, match=r"vector\[2\] and vector\[3\]"):
            REGISTRY[name].rule((two, three), {})
        with pytest.raises(TypeClash):
            REGISTRY[name].rule((two, FLOAT), {})
    for name in ("norm", "l2_normalise"):
        with pytest.raises(TypeClash):
            REGISTRY[name].rule((FLOAT,), {})
    for types in ((), (STRING,), (two,)):
        with pytest.raises(TypeClash):
            REGISTRY["pack"].rule(types, {})
