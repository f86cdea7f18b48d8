from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows
from tackboard.features.kernels import arithmetic
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import FLOAT, ID, INT, STRING, TIME, FeatureType

PAIRS = [("int", "int"), ("bool", "bool"), ("bool", "int"), ("int", "float"), ("float", "bool"), ("float", "float")]
WHOLE_PAIRS = [("int", "int"), ("bool", "int"), ("int", "bool")]


def wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def slow(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operation of Python's on numbers, with ints that wrap and with ints beside floats as floats."""

    def twin(a: Any, b: Any) -> Any:
        if isinstance(a, float) or isinstance(b, float):
            return operation(float(a), float(b))
        return wrapped(operation(int(a), int(b)))

    return twin


def slow_divide(a: Any, b: Any) -> float:
    a, b = float(a), float(b)
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


@pytest.mark.parametrize("kinds", PAIRS, ids=" ".join)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_two_numbers(check_kernel: Callable[..., None], kinds: tuple[str, str], data: st.DataObject) -> None:
    check_kernel(data, "add", kinds, slow(lambda a, b: a + b))
    check_kernel(data, "subtract", kinds, slow(lambda a, b: a - b))
    check_kernel(data, "multiply", kinds, slow(lambda a, b: a * b))
    check_kernel(data, "divide", kinds, slow_divide)


@pytest.mark.parametrize("kinds", WHOLE_PAIRS, ids=" ".join)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_whole_division(check_kernel: Callable[..., None], kinds: tuple[str, str], data: st.DataObject) -> None:
    check_kernel(data, "floor_divide", kinds, lambda a, b: wrapped(int(a) // int(b)) if b else None)
    check_kernel(data, "modulo", kinds, lambda a, b: int(a) % int(b) if b else None)


@pytest.mark.parametrize("kind", ["int", "float"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_one_number(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    check_kernel(data, "negate", [kind], lambda a: wrapped(-a) if kind == "int" else -a)
    check_kernel(data, "absolute", [kind], lambda a: wrapped(abs(a)) if kind == "int" else abs(a))
    check_kernel(data, "floor", [kind], slow_floor)


def slow_floor(a: Any) -> Any:
    if isinstance(a, int) or not math.isfinite(a):
        return a
    return math.copysign(float(math.floor(a)), a)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_negated_bool_is_an_int(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    check_kernel(data, "negate", ["bool"], lambda a: -int(a))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_not_a_number_has_the_same_bits_in_any_row_of_any_length(name: str) -> None:
    kernel = REGISTRY[name].kernel
    nans = [math.nan, -math.nan, math.inf, -math.inf, 0.0]
    with np.errstate(all="ignore"):
        for length in (*range(1, 40), 1001):
            left = Column.of(FLOAT, [nans[row % 5] for row in range(length)])
            for shift in range(5):
                right = Column.of(FLOAT, [nans[(row // 5 + shift) % 5] for row in range(length)])
                whole = kernel(left, right)
                alone = [kernel(left.take(np.array([r])), right.take(np.array([r]))).values for r in range(length)]
                assert len(differing_rows(whole, Column(FLOAT, np.concatenate(alone)))) == 0


def test_nothing_missing_stays_without_a_mask() -> None:
    column = Column.of(INT, [4, 5])
    for name in ("add", "subtract", "multiply", "divide", "floor_divide", "modulo"):
        assert REGISTRY[name].kernel(column, column).present is None
    assert arithmetic.negate(column).present is None


@pytest.mark.parametrize(
    ("name", "types", "fix"),
    [
        ("subtract", (TIME, TIME), "seconds_since"),
        ("add", (STRING, STRING), "concat"),
        ("multiply", (INT, ID), "id is a name"),
        ("divide", (FeatureType("vector", width=2), FLOAT), ""),
        ("floor_divide", (FLOAT, INT), "floor()"),
        ("modulo", (TIME, INT), "seconds_since"),
        ("absolute", (STRING,), ""),
        ("floor", (FeatureType("bool"),), ""),
    ],
)
def test_other_types_clash(name: str, types: tuple[FeatureType, ...], fix: str) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, {})
    assert fix in clash.value.fix
    assert clash.value.allowed
