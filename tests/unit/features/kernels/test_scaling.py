from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows
from tackboard.features.kernels.scaling import bucketize
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import FLOAT, INT, STRING, TIME, FeatureType

KINDS = ("bool", "int", "float")
FUNCTIONS: dict[str, Callable[[float], float]] = {"log": math.log, "log1p": math.log1p, "exp": math.exp}
BOUNDS = st.sampled_from([0, -3, 2**53, 0.0, -0.0, 0.5, -1e300]) | st.floats(-1e6, 1e6)


def slow(function: Callable[[float], float], value: float) -> float:
    """What the function is at `value`, by Python's library, with IEEE 754's values outside its domain."""
    try:
        return function(float(value))
    except OverflowError:
        return math.inf
    except ValueError:
        return -math.inf if value == (-1 if function is math.log1p else 0) else math.nan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_functions(check_kernel: Callable[..., None], name: str, kind: str, data: st.DataObject) -> None:
    def twin(value: Any) -> float:
        # Python's library is another one and its last bits may differ: NumPy's value for this row, if it is close.
        with np.errstate(all="ignore"):
            fast = float(getattr(np, name)(np.array([float(value)]))[0])
        expected = slow(FUNCTIONS[name], value)
        close = math.isclose(fast, expected, rel_tol=1e-15, abs_tol=5e-324)
        return fast if close or (math.isnan(fast) and math.isnan(expected)) else expected

    check_kernel(data, name, [kind], twin)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sqrt_is_exact(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    check_kernel(data, "sqrt", [kind], lambda a: math.nan if a < 0 else math.sqrt(float(a)))


@pytest.mark.parametrize("name", [*FUNCTIONS, "sqrt"])
def test_strides_and_lengths_do_not_change_a_bit(name: str) -> None:
    kernel = REGISTRY[name].kernel
    numbers = np.random.default_rng(3).lognormal(sigma=3, size=4001)
    with np.errstate(all="ignore"):
        every_other = kernel(Column(FLOAT, numbers[::2]))
        assert len(differing_rows(every_other, kernel(Column(FLOAT, numbers[::2].copy())))) == 0
        whole = kernel(Column(FLOAT, numbers))
        for start, length in ((0, 1), (5, 3), (1, 7), (3, 100), (4000, 1)):
            part = kernel(Column(FLOAT, numbers[start : start + length]))
            assert len(differing_rows(part, whole.take(np.arange(start, start + length)))) == 0


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), low=st.none() | BOUNDS, high=st.none() | BOUNDS)
@settings(max_examples=25, deadline=None)
def test_clip(check_kernel: Callable[..., None], kind: str, data: st.DataObject, low: Any, high: Any) -> None:
    if low is None and high is None:
        low = 0
    if low is not None and high is not None and low > high:
        low, high = high, low
    number = float if kind == "float" or isinstance(low, float) or isinstance(high, float) else int

    def twin(value: Any) -> Any:
        value = number(value)
        if low is not None and value < number(low):
            return number(low)
        return number(high) if high is not None and value > number(high) else value

    check_kernel(data, "clip", [kind], twin, low=low, high=high)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), mean=BOUNDS, std=st.sampled_from([1, 3, 5e-324, 0.1]) | st.floats(1e-9, 1e9))
@settings(max_examples=25, deadline=None)
def test_normalise(check_kernel: Callable[..., None], kind: str, data: st.DataObject, mean: Any, std: Any) -> None:
    check_kernel(data, "normalise", [kind], lambda a: (float(a) - float(mean)) / float(std), mean=mean, std=std)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), boundaries=st.lists(BOUNDS, min_size=1, max_size=6, unique=True).map(sorted))
@settings(max_examples=25, deadline=None)
def test_bucketize(check_kernel: Callable[..., None], kind: str, data: st.DataObject, boundaries: list[Any]) -> None:
    exact = kind != "float" and all(isinstance(boundary, int) for boundary in boundaries)

    def twin(value: Any) -> int:
        if value != value:
            return len(boundaries)
        number = int if exact else float
        return bisect.bisect_right([number(boundary) for boundary in boundaries], number(value))

    check_kernel(data, "bucketize", [kind], twin, boundaries=boundaries)


def test_int_boundaries_are_exact_for_ints() -> None:
    column = Column.of(INT, [2**53, 2**53 + 1])
    assert bucketize(column, boundaries=[2**53 + 1]).to_pylist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "type_", "params"),
    [
        ("log", STRING, {}),
        ("exp", TIME, {}),
        ("clip", STRING, {"low": 0}),
        ("clip", INT, {}),
        ("clip", INT, {"low": None, "high": None}),
        ("clip", INT, {"low": 2, "high": 1}),
        ("clip", FLOAT, {"low": math.nan}),
        ("clip", FLOAT, {"high": math.inf}),
        ("clip", FLOAT, {"high": "1"}),
        ("normalise", FLOAT, {"mean": 0}),
        ("normalise", FLOAT, {"mean": 0, "std": 0}),
        ("normalise", FLOAT, {"mean": 0, "std": -1.0}),
        ("normalise", FLOAT, {"mean": math.nan, "std": 1}),
        ("bucketize", TIME, {"boundaries": [1]}),
        ("bucketize", FLOAT, {"boundaries": []}),
        ("bucketize", FLOAT, {"boundaries": 3}),
        ("bucketize", FLOAT, {"boundaries": [1, 1.0]}),
        ("bucketize", FLOAT, {"boundaries": [2, 1]}),
        ("bucketize", FLOAT, {"boundaries": [0, math.inf]}),
        ("bucketize", FLOAT, {"boundaries": ["a"]}),
    ],
)
def test_wrong_types_and_parameters_clash(name: str, type_: FeatureType, params: dict[str, Any]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule((type_,), params)
    assert clash.value.allowed
