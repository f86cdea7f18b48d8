from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column
from tackboard.features.kernels.comparison import common_type, in_one_dictionary, is_in, need_constant
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

NUMBERS = [("int", "int"), ("bool", "int"), ("int", "float"), ("float", "float")]
ORDERED = [*NUMBERS, ("time", "time")]
EQUALS = [*ORDERED, ("string", "string"), ("id", "id"), ("id", "int")]
VECTOR = FeatureType("vector", width=2)


def slow(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A comparison of Python's, which is exact, with ints beside floats as floats."""

    def twin(a: Any, b: Any) -> bool:
        return compare(float(a), float(b)) if isinstance(a, float) or isinstance(b, float) else compare(a, b)

    return twin


@pytest.mark.parametrize("kinds", EQUALS, ids=" ".join)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equality(check_kernel: Callable[..., None], kinds: tuple[str, str], data: st.DataObject) -> None:
    check_kernel(data, "equal", kinds, slow(operator.eq))
    check_kernel(data, "not_equal", kinds, slow(operator.ne))


@pytest.mark.parametrize("kinds", ORDERED, ids=" ".join)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_order(check_kernel: Callable[..., None], kinds: tuple[str, str], data: st.DataObject) -> None:
    check_kernel(data, "less", kinds, slow(operator.lt))
    check_kernel(data, "less_equal", kinds, slow(operator.le))
    check_kernel(data, "greater", kinds, slow(operator.gt))
    check_kernel(data, "greater_equal", kinds, slow(operator.ge))


def slow_and(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def slow_or(a: bool | None, b: bool | None) -> bool | None:
    if a is True or b is True:
        return True
    return None if a is None or b is None else False


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_logic_of_three_values(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    check_kernel(data, "and", ("bool", "bool"), slow_and, sees_missing=True)
    check_kernel(data, "or", ("bool", "bool"), slow_or, sees_missing=True)
    check_kernel(data, "not", ["bool"], lambda a: not a)


@pytest.mark.parametrize("kind", ["int", "string", "id", "time"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_membership(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    number = st.sampled_from([0, 1, -3, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
    text = st.sampled_from(["", "a", "\u00e9", "unused", "x"]) | st.text(max_size=3)
    values = data.draw(st.lists(text if kind == "string" else number, max_size=6))
    check_kernel(data, "is_in", [kind], lambda a: a in values, values=values)


@pytest.mark.parametrize(
    "kinds",
    [("bool", "bool"), ("bool", "int"), ("int", "int"), ("int", "float"), ("string", "string"), ("time", "time")],
    ids=" ".join,
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_choice(check_kernel: Callable[..., None], kinds: tuple[str, str], data: st.DataObject) -> None:
    def twin(condition: bool | None, a: Any, b: Any) -> Any:
        chosen = None if condition is None else a if condition else b
        if chosen is None or kinds[0] == kinds[1]:
            return chosen
        return float(chosen) if "float" in kinds else int(chosen)

    check_kernel(data, "if_else", ("bool", *kinds), twin, sees_missing=True)


def test_a_request_pays_for_its_rows_and_not_for_the_whole_dictionary() -> None:
    dictionary = np.array([f"name {number}" for number in range(1000)], dtype=np.object_)
    column = Column(STRING, np.array([5, 999, 5]), dictionary=dictionary)
    merged, (left, right) = in_one_dictionary(column, Column.of(STRING, ["b"]))
    assert (merged[left].tolist(), merged[right].tolist()) == (["name 5", "name 999", "name 5"], ["b"])
    assert len(merged) == 3
    assert in_one_dictionary(column, column)[0] is dictionary


def test_a_column_that_is_all_missing_may_have_no_strings() -> None:
    empty = Column(
        STRING.with_nullable(True),
        np.array([0, 17]),
        present=np.zeros(2, dtype=np.bool_),
        dictionary=np.zeros(0, dtype=np.object_),
    )
    assert REGISTRY["equal"].kernel(empty, empty).to_pylist() == [None, None]
    assert is_in(empty, values=["a"]).to_pylist() == [None, None]
    chosen = REGISTRY["if_else"].kernel(Column.of(BOOL, [True, False]), empty, Column.of(STRING, ["b"]))
    assert chosen.to_pylist() == [None, "b"]


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("equal", (ID, STRING)),
        ("equal", (STRING, INT)),
        ("equal", (VECTOR, VECTOR)),
        ("equal", (TIME, INT)),
        ("not_equal", (ID, FLOAT)),
        ("less", (STRING, STRING)),
        ("less", (ID, ID)),
        ("greater", (TIME, FLOAT)),
        ("and", (BOOL, INT)),
        ("not", (STRING,)),
        ("if_else", (INT, FLOAT, FLOAT)),
        ("if_else", (BOOL, FLOAT, STRING)),
        ("if_else", (BOOL, ID, INT)),
    ],
)
def test_other_types_clash(name: str, types: tuple[FeatureType, ...]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, {})
    assert clash.value.allowed
    assert ("hash_id()" in clash.value.fix) == (types == (ID, STRING))


@pytest.mark.parametrize(
    ("type_", "values"),
    [(INT, None), (INT, "ab"), (INT, [1.0]), (INT, [True]), (INT, [2**63]), (STRING, [1]), (ID, ["a"]), (FLOAT, [1])],
)
def test_membership_takes_constants_of_the_kind_only(type_: FeatureType, values: Any) -> None:
    with pytest.raises(TypeClash):
        REGISTRY["is_in"].rule((type_,), {"values": values})


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        (BOOL, [True], [1, None]),
        (INT, [0, -(2**63)], [-(2**63) - 1, 1.0, False, "1"]),
        (FLOAT, [1, 0.5, -0.0], [float("nan"), float("inf"), 10**400, True, "1"]),
        (STRING, ["", "\U0001f642"], ["\ud800", 1, None]),
        (TIME, [0], [0.5]),
    ],
)
def test_constants_are_checked(type_: FeatureType, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        need_constant(type_, value)
    for value in bad:
        with pytest.raises(TypeClash):
            need_constant(type_, value)


def test_the_common_type_is_the_widest_number() -> None:
    assert common_type((BOOL, INT.with_nullable(True))) == INT
    assert common_type((BOOL, BOOL, FLOAT)) == FLOAT
    assert common_type((BOOL, BOOL)) == BOOL
    assert common_type((VECTOR, VECTOR), ("vector",)) == VECTOR
