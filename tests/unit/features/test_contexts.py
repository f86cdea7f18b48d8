"""Contexts: JSON objects of events as columns of the declared types, and an error that names feature and line."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.entities import Declared
from tackboard.features.language import (
    Bool,
    Context,
    Events,
    FeatureSet,
    Float,
    Id,
    Int,
    List,
    Request,
    String,
    Time,
    Vector,
)


def read(declared: Declared, values: list[Any]) -> Any:
    """The column that JSON values become; NO stands for an event without the key."""
    plan = FeatureSet("home", x=Context(key=declared).key.is_missing()).plan
    texts = [json.dumps({"key": value, "other": 1}) for value in values]
    column = context_columns(plan, pa.chunked_array([texts[:1], texts[1:]], pa.string()))["key"]
    assert column.type.kind == declared.type.kind
    return column.to_pylist()


@pytest.mark.parametrize(
    ("declared", "values", "expected"),
    [
        (Bool(), [True, None, False], [True, None, False]),
        (Int(), [5, None, -(1 << 63), (1 << 63) - 1], [5, None, -(1 << 63), (1 << 63) - 1]),
        (Float(), [1, 2.5, None], [1.0, 2.5, None]),
        (String(), ["caf\u00e9", "", None, "caf\u00e9"], ["caf\u00e9", "", None, "caf\u00e9"]),
        (Id(), [7, "seven", None], [7, string_id("seven"), None]),
        (Time(), [1_700_000_000_000, None], [1_700_000_000_000, None]),
        (Vector(2), [[1, 0.5], None], [[1.0, 0.5], None]),
        (List(Id), [[1, "a"], [], None], [[1, string_id("a")], [], None]),
        (List(String), [["a", "b"], None], [["a", "b"], None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, Declared) else "",
)
def test_values_of_every_type(declared: Declared, values: list[Any], expected: list[Any]) -> None:
    assert read(declared, values) == expected


@pytest.mark.parametrize(
    ("declared", "value", "says"),
    [
        (Bool(), 1, "context.key is 1 in"),
        (Int(), True, "context.key is true in"),
        (Int(), 1 << 63, "context.key is 9223372036854775808 in"),
        (Int(), 1.0, "context.key is 1.0 in"),
        (Float(), "1.0", 'context.key is "1.0" in'),
        (Float(), 10**400, "context.key is 1000"),
        (String(), 5, "context.key is 5 in"),
        (String(), "\ud800", "context.key is"),
        (Id(), 1.5, "context.key is 1.5 in"),
        (Time(), "2024-01-01", 'context.key is "2024-01-01" in'),
        (Vector(2), [1, 2, 3], "context.key is [1, 2, 3] in"),
        (Vector(2), [1, None], "context.key is [1, null] in"),
        (List(Int), [1, None], "context.key is [1, null] in"),
        (List(Int), {"a": 1}, 'context.key is {"a": 1} in'),
    ],
)
def test_another_type_is_named_with_feature_and_line(declared: Declared, value: Any, says: str) -> None:
    with pytest.raises(DataError) as refused:
        read(declared, [None, value])
    assert refused.value.got.startswith("feature x (test_contexts.py:")
    assert says in refused.value.got
    assert refused.value.allowed.startswith("declared: ")


def test_missing_keys_missing_contexts_and_defaults() -> None:
    context = Context(device=String(), slot=Int(default=3))
    plan = FeatureSet("home", device=context.device, slot=context.slot, count=Events().count()).plan
    assert [node.params["column"] for _, node in context_sources(plan)] == ["device", "slot"]
    columns = context_columns(plan, pa.array(['{"device": "tv"}', None, "{}", '{"slot": 1}', ""]))
    assert columns["device"].to_pylist() == ["tv", None, None, None, None]
    # The executors fill defaults in, where a request brings no value too.
    assert columns["slot"].to_pylist() == [None, None, None, 1, None]
    assert context_columns(plan, pa.nulls(2, pa.string()))["device"].to_pylist() == [None, None]
    assert context_columns(plan, pa.array(['{"device": "tv", "slot": 1}'] * 2))["device"].present is None


def test_a_plan_without_context_reads_none() -> None:
    plan = FeatureSet("home", hour=Request().time.hour()).plan
    assert context_columns(plan, pa.array(["no JSON"])) == {}


@pytest.mark.parametrize("text", ["[1]", "{", "5", '"a"', "[" * 100_000])
def test_what_is_no_object(text: str) -> None:
    plan = FeatureSet("home", device=Context(device=String()).device).plan
    with pytest.raises(DataError, match="is not a JSON object"):
        context_columns(plan, pa.array([text]))
