"""Vector kernels against plain Python, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import FLOAT, STRING, FeatureType

TWO, THREE = FeatureType("vector", width=2), FeatureType("vector", width=3)


def slow_dot(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def slow_cosine(a: list[float], b: list[float]) -> float:
    if not any(a) or not any(b):
        return 0.0
    return slow_dot(a, b) / math.sqrt(slow_dot(a, a) * slow_dot(b, b))


def slow_normalise(a: list[float]) -> list[float]:
    length = math.sqrt(slow_dot(a, a)) if any(a) else 1.0
    return [float(np.float32(x / length)) for x in a]


@pytest.mark.parametrize("width", [1, 3])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_against_plain_python(check_kernel: Callable[..., None], width: int, data: st.DataObject) -> None:
    kind = f"vector[{width}]"
    check_kernel(data, "dot", [kind, kind], slow_dot)
    check_kernel(data, "cosine", [kind, kind], slow_cosine)
    check_kernel(data, "norm", [kind], lambda a: math.sqrt(slow_dot(a, a)))
    check_kernel(data, "l2_normalise", [kind], slow_normalise)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_pack(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    def twin(x: float, i: int, b: bool) -> list[float]:
        with np.errstate(all="ignore"):
            return [float(np.float32(value)) for value in (x, np.int64(i), b)]

    check_kernel(data, "pack", ["float", "int", "bool"], twin)


def test_bits_do_not_depend_on_the_length_of_the_column() -> None:
    random = np.random.default_rng(2)
    values = random.normal(size=(300, 16)).astype(np.float32)
    values[random.random(values.shape) < 0.02] = np.nan
    values[random.random(values.shape) < 0.02] = -np.inf
    column, other = (Column(FeatureType("vector", width=16), part) for part in (values, values[::-1].copy()))
    with np.errstate(all="ignore"):
        for name, inputs in (("dot", (column, other)), ("cosine", (column, other)), ("l2_normalise", (column,))):
            whole = REGISTRY[name].kernel(*inputs)
            for row in range(300):
                alone = REGISTRY[name].kernel(*(one.take(np.array([row])) for one in inputs))
                assert not len(differing_rows(alone, whole.take(np.array([row]))))


def test_edges() -> None:
    tiny = Column.of(TWO, [[1e-45, 0.0], [3e38, 3e38]])
    assert REGISTRY["cosine"].kernel(tiny, tiny).to_pylist() == [1.0, 1.0]
    assert str(REGISTRY["l2_normalise"].kernel(Column.of(TWO, [[-0.0, 0.0]])).to_pylist()) == "[[-0.0, 0.0]]"


@pytest.mark.parametrize(
    ("name", "types"),
    [
        *((name, types) for name in ("dot", "cosine") for types in ((TWO, THREE), (TWO, FLOAT), (TWO,))),
        *((name, (FLOAT,)) for name in ("norm", "l2_normalise")),
        *(("pack", types) for types in ((), (STRING,), (TWO,))),
    ],
)
def test_wrong_types(name: str, types: tuple[FeatureType, ...]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, {})
    assert clash.value.allowed
