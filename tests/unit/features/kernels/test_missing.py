from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column
from tackboard.features.kernels.missing import coalesce, fill_missing, is_missing, missing_if
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

CONSTANTS: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [0, 7, -(2**63), 2**63 - 1],
    "float": [0.0, -0.0, 3, 0.1],
    "string": ["", "a", "\u00e9"],
    "id": [0, -1],
    "time": [0, 2**63 - 1],
}
VECTOR, LIST = FeatureType("vector", width=2, nullable=True), FeatureType("list", element="int", nullable=True)


@pytest.mark.parametrize("kind", [*CONSTANTS, "vector[2]", "list[int]"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_is_missing(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    check_kernel(data, "is_missing", [kind], lambda a: a is None, sees_missing=True)


@pytest.mark.parametrize("kind", CONSTANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_constants(check_kernel: Callable[..., None], kind: str, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(CONSTANTS[kind]))
    filler = float(value) if kind == "float" else value
    check_kernel(data, "fill_missing", [kind], lambda a: filler if a is None else a, sees_missing=True, value=value)
    check_kernel(data, "missing_if", [kind], lambda a: None if a == value else a, value=value)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_filling_vectors_and_lists(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    def twin_of(filler: Any) -> Callable[[Any], Any]:
        return lambda a: filler if a is None else a

    check_kernel(data, "fill_missing", ["vector[2]"], twin_of([2.5, 2.5]), sees_missing=True, value=2.5)
    check_kernel(data, "fill_missing", ["list[int]"], twin_of([]), sees_missing=True, value=[])


@pytest.mark.parametrize(
    "kinds",
    [
        ("int", "int"),
        ("bool", "bool", "bool"),
        ("bool", "int"),
        ("int", "bool", "float"),
        ("string", "string", "string"),
        ("id", "id"),
        ("time", "time"),
        ("vector[2]", "vector[2]"),
    ],
    ids=" ".join,
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_coalesce(check_kernel: Callable[..., None], kinds: tuple[str, ...], data: st.DataObject) -> None:
    def twin(*values: Any) -> Any:
        first = next((value for value in values if value is not None), None)
        if first is None or len(set(kinds)) == 1:
            return first
        return float(first) if "float" in kinds else int(first)

    check_kernel(data, "coalesce", kinds, twin, sees_missing=True)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_finite(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    check_kernel(data, "finite", ["float"], lambda a: a if math.isfinite(a) else None)


def test_a_sequence_may_be_missing_too() -> None:
    type_ = FeatureType("sequence", nullable=True, columns=(("item", FeatureType("list", element="id")),))
    assert REGISTRY["is_missing"].rule((type_,), {}) == BOOL
    assert is_missing(Column.of(type_, [{"item": [1]}, None])).to_pylist() == [False, True]


def test_strings_without_a_dictionary_are_filled() -> None:
    empty = Column(
        STRING.with_nullable(True),
        np.zeros(2, dtype=np.int64),
        present=np.zeros(2, dtype=np.bool_),
        dictionary=np.zeros(0, dtype=np.object_),
    )
    assert fill_missing(empty, value="a").to_pylist() == ["a", "a"]
    assert missing_if(empty, value="a").mask.tolist() == [False, False]
    assert coalesce(empty, Column.of(STRING, ["b", "c"])).to_pylist() == ["b", "c"]


@pytest.mark.parametrize(
    ("name", "type_", "value"),
    [
        ("fill_missing", INT, 0.5),
        ("fill_missing", INT, None),
        ("fill_missing", FLOAT, math.nan),
        ("fill_missing", STRING, 0),
        ("fill_missing", ID, "a"),
        ("fill_missing", TIME, "2024-01-01"),
        ("fill_missing", VECTOR, [0.0, 0.0]),
        ("fill_missing", VECTOR, 1e39),
        ("fill_missing", LIST, [1]),
        ("fill_missing", LIST, 0),
        ("missing_if", INT, "0"),
        ("missing_if", VECTOR, 0.0),
        ("finite", INT, None),
    ],
)
def test_other_constants_clash(name: str, type_: FeatureType, value: Any) -> None:
    with pytest.raises(TypeClash):
        REGISTRY[name].rule((type_.with_nullable(True),), {"value": value})


def test_coalesce_needs_one_kind_and_two_values() -> None:
    rule = REGISTRY["coalesce"].rule
    for types in ((INT,), (INT, STRING), (ID, INT), (LIST, LIST), (VECTOR, FeatureType("vector", width=3))):
        with pytest.raises(TypeClash):
            rule(types, {})
    maybe = INT.with_nullable(True)
    assert rule((maybe, maybe), {}) == maybe
    assert rule((maybe, INT), {}) == INT
