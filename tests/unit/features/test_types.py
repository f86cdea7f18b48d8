"""Types: how they are spelt, stored, and read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.features.types import (
    BOOL,
    FLOAT,
    ID,
    INT,
    KINDS,
    SCALARS,
    STRING,
    TIME,
    VIEW,
    FeatureType,
    type_from_json,
)

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
    ("type_", "text", "model_kind"),
    [
        (INT, "int", "dense"),
        (BOOL.with_nullable(True), "bool?", "dense"),
        (ID, "id", "id"),
        (TIME, "time", "timestamp"),
        (STRING, "string", None),
        (FeatureType("vector", width=3, nullable=True), "vector[3]?", "vector"),
        (ID.in_list(), "list[id]", "id list"),
        (FLOAT.in_list(), "list[float]", "number list"),
        (STRING.in_list(), "list[string]", None),
        (TIME.in_list(), "list[time]", None),
        (FeatureType("sequence", columns=(("a", ID.in_list()),)), "sequence{a: id}", "sequence"),
        (VIEW, "view", None),
    ],
)
def test_a_type_is_spelt_and_known_to_models(type_: FeatureType, text: str, model_kind: str | None) -> None:
    assert str(type_) == text
    assert type_.model_kind == model_kind


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


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(KINDS),
                    lambda inner: st.lists(inner) | st.dictionaries(
                        st.sampled_from(["kind", "element", "width", "nullable", "columns", "x"]), inner)))  # fmt: skip
def test_any_json_is_a_type_or_an_error(data: Any) -> None:
    try:
        type_ = type_from_json(data)
    except DataError:
        return
    assert type_from_json(type_.to_json()) == type_
