"""Entities: declared columns, built-in columns, and what is not declared does not exist."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.features.entities import (
    BUILT_IN,
    Bool,
    Context,
    Declared,
    Events,
    Float,
    Id,
    Int,
    Item,
    List,
    Request,
    String,
    Time,
    User,
    Vector,
)
from tackboard.features.expressions import days
from tackboard.features.types import FeatureType, type_from_json


@pytest.mark.parametrize(
    ("declared", "type_"),
    [
        (Bool(), "bool?"),
        (Bool(default=False), "bool"),
        (Int(minimum=0), "int?"),
        (Int(default=0), "int"),
        (Float(default=0.0), "float"),
        (String(default=""), "string"),
        (Id(default=0), "id"),
        (Time(), "time?"),
        (Vector(3), "vector[3]?"),
        (List(Id), "list[id]?"),
        (List(Float(minimum=0)), "list[float]?"),
    ],
)
def test_an_attribute_may_be_missing_unless_it_has_a_default(declared: Declared, type_: str) -> None:
    params = declared.to_params("item", "x")
    assert str(type_from_json(params["type"])) == type_
    assert ("default" in params) == (not type_.endswith("?"))


def test_ranges_and_defaults_travel() -> None:
    params = Int(minimum=0, maximum=9, default=0).to_params("item", "stock")
    kind = FeatureType("int").to_json()
    assert params == {"entity": "item", "column": "stock", "type": kind, "minimum": 0, "maximum": 9, "default": 0}


@pytest.mark.parametrize(
    ("entity", "kind"),
    [(User(x=Int), "user"), (Item(x=Int), "item"), (Context(x=Int), "context"), (Events(x=Int), "event")],
)
def test_columns_by_attribute_and_by_name(entity: Any, kind: str) -> None:
    for made in (entity.x, entity["x"]):
        assert made.op == "source" and (made.params["entity"], made.params["column"]) == (kind, "x")
    for column, type_ in BUILT_IN[kind].items():
        assert entity[column].params == {"entity": kind, "column": column, "type": type_.to_json()}
    unknown = entity.y
    assert unknown.op == "unknown_column" and unknown.params["known"] == [*BUILT_IN[kind], "x"]
    with pytest.raises(AttributeError):
        getattr(entity, "_hidden")  # noqa: B009


def test_a_column_may_have_the_name_of_an_operator() -> None:
    """`events.count` is the aggregation, so such a column is read by name."""
    events = Events(count=Int)
    assert events["count"].op == "source"
    assert events.count().op == "count"
    assert Item(hour=Int).hour.op == "source"


def test_the_request_has_a_time() -> None:
    assert Request().time.params["type"] == {"kind": "time"}
    assert Request().id.op == "unknown_column"


def test_choices_of_events_follow_each_other() -> None:
    events = Events(dwell_ms=Int)
    chosen = events.where(events.action == "click").within(days(7)).newest(3)
    view = chosen.count().args[0]
    names = []
    while view.args:
        names.append(view.op)
        view = view.args[0]
    assert names == ["newest", "within", "where"] and view.op == "events"
    within = events.within(days(1)).count().args[0]
    assert type(within.params["duration_ms"]) is int, "a duration is a plain number in parameters"
    assert chosen["dwell_ms"].params == events["dwell_ms"].params, "a choice has the same columns"
    assert events.count().args[0].op == "events", "choosing leaves the events as they were"


def test_columns_cannot_be_looped_over() -> None:
    """Python would otherwise ask for column 0, 1, 2, … until memory ends."""
    for loop in (list, max, lambda events: 3 in events):
        with pytest.raises(UsageError, match=r"test_entities\.py:\d+: columns of events cannot be looped over"):
            loop(Events())


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda: Events().within(7), "within(7)"),
        (lambda: Events().within("7d"), "within('7d')"),
        (lambda: Events().within(datetime.timedelta(7)), "within(datetime.timedelta(days=7))"),
        (lambda: Events().within(Events().time), "within(an expression ("),
        (lambda: Events().between(days(7), 1), "between(604800000, 1)"),
        (lambda: Events().decayed_sum(1, half_life=0.5), "decayed_sum(half_life=0.5)"),
    ],
)
def test_a_bare_number_is_no_duration(wrong: Callable[[], object], got: str) -> None:
    """Seven what? `within(7)` was once seven milliseconds."""
    with pytest.raises(UsageError) as error:
        wrong()
    assert error.value.got.startswith(f"test_entities.py:{wrong.__code__.co_firstlineno}: {got}")
    assert error.value.allowed == "give a duration: days(7), hours(1), minutes(5)"


@pytest.mark.parametrize("wrong", [5, float, "Float"])
def test_a_column_is_declared_with_a_type(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"test_entities\.py:\d+: price=.* declares no type"):
        Item(price=wrong)
