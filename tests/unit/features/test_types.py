"""Types: how they are spelt, stored, and read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.features.types import BOOL, ID, INT, KINDS, SCALARS, VIEW, FeatureType, type_from_json

LISTS = st.builds(lambda element: FeatureType("list", element=element), st.sampled_from(SCALARS))
TYPES = st.one_of(
    st.builds(FeatureType, st.sampled_from(SCALARS), nullable=st.booleans()),
    st.builds(lambda width, flag: FeatureType("vector", width=width, nullable=flag), st.integers(1, 9), st.booleans()),
    LISTS,
    st.builds(
        lambda columns: FeatureType("sequence", columns=tuple(columns.items())),
        st.dictionaries(st.sampled_from(["item", "action", "gap"]), LISTS, min_size=1),
    ),
)


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (INT, "int"),
        (BOOL.with_nullable(True), "bool?"),
        (FeatureType("vector", width=3, nullable=True), "vector[3]?"),
        (ID.in_list(), "list[id]"),
        (FeatureType("sequence", columns=(("a", ID.in_list()),)), "sequence{a: id}"),
        (VIEW, "view"),
    ],
)
def test_a_type_is_spelt(type_: FeatureType, text: str) -> None:
    assert str(type_) == text


@given(TYPES)
def test_json_gives_the_type_back(type_: FeatureType) -> None:
    assert type_from_json(json.loads(json.dumps(type_.to_json()))) == type_


def test_parts_of_types() -> None:
    assert INT.is_number and BOOL.is_number and not ID.is_number and not INT.in_list().is_number
    assert INT.in_list().of_elements() == INT and INT.of_elements() == INT
    assert INT.with_nullable(False) is INT
    assert INT.with_nullable(True).with_nullable(False) == INT


@pytest.mark.parametrize(
    "data",
    [
        None,
        "int",
        [],
        {},
        {"kind": "decimal"},
        {"kind": ["int"]},
        {"kind": "int", "colour": 1},
        {"kind": "vector", "width": -1},
        {"kind": "vector", "width": True},
        {"kind": "vector", "width": "3"},
        {"kind": "vector"},
        {"kind": "list", "element": "list"},
        {"kind": "list"},
        {"kind": "list", "element": ["int"]},
        {"kind": "int", "element": "int"},
        {"kind": "int", "width": 3},
        {"kind": "sequence", "columns": []},
        {"kind": "sequence", "columns": {"a": 3}},
        {"kind": "sequence", "columns": {"a": {"kind": "int"}}},
        {"kind": "int", "columns": {"a": {"kind": "list", "element": "int"}}},
        {"kind": "int", "nullable": "no"},
    ],
)
def test_what_is_no_type_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="is not a feature type"):
        type_from_json(data)


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(KINDS),
                    lambda inner: st.lists(inner) | st.dictionaries(
                        st.sampled_from(["kind", "element", "width", "nullable", "columns", "x"]), inner)))  # fmt: skip
def test_any_json_is_a_type_or_an_error(data: Any) -> None:
    try:
        type_ = type_from_json(data)
    except DataError:
        return
    assert type_from_json(type_.to_json()) == type_
