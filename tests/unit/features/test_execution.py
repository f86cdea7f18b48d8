"""The one loop behind both executors: spreading, constants, declared ranges, sources that are not there, threads."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import DataError
from tackboard.features.column import Column
from tackboard.features.entities import Events, Float, Int, Item, List, String, User, Vector
from tackboard.features.execution import Program
from tackboard.features.expressions import Expression, coalesce, concat, if_else, pack
from tackboard.features.frame import Frame
from tackboard.features.plan import compile_features
from tackboard.features.types import FLOAT, INT, STRING, FeatureType
from tackboard.features.views import visible_before

item = Item(price=Float(minimum=0, maximum=100), stock=Int(maximum=9), title=String, look=Vector(2), tags=List(Int))
user = User(level=Int, taste=Vector(2), name=String, likes=List(Int))
events = Events(value=Float)
VECTOR = FeatureType("vector", width=2)


def run(
    features: dict[str, Expression], columns: dict[tuple[str, str], Column], request_of: list[int], requests: int
) -> dict[str, list[Any]]:
    frame = Frame(
        num_requests=requests,
        num_candidates=len(request_of),
        request_of=np.array(request_of, dtype=np.int64),
        request_ms=np.arange(requests) * 100 + 100,
        event_times=np.array([0, 50, 150]),
        visible=visible_before(np.array([0, 50, 150]), np.array([0, 3]), np.zeros(requests, np.int64),
                               np.arange(requests) * 100 + 100),
        columns=columns,
    )  # fmt: skip
    found = Program(compile_features(features)).run(frame)
    return {name: column.to_pylist() for name, column in found.items()}


COLUMNS = {
    ("user", "level"): Column.of(INT, [10, None]),
    ("user", "taste"): Column.of(VECTOR, [[1.0, 0.0], [0.0, 2.0]]),
    ("user", "name"): Column.of(STRING, ["u", "v"]),
    ("user", "likes"): Column.of(INT.in_list(), [[1, 2], []]),
    ("item", "stock"): Column.of(INT, [1, 2, None]),
    ("item", "look"): Column.of(VECTOR, [[1.0, 1.0], None, [3.0, 4.0]]),
    ("item", "title"): Column.of(STRING, ["a", "b", "c"]),
    ("item", "tags"): Column.of(INT.in_list(), [[2], [1, 3], None]),
}


def test_values_of_a_request_are_spread_over_its_candidates() -> None:
    found = run(
        {
            "sum": user.level + item.stock,
            "dot": user.taste.dot(item.look),
            "text": concat(user.name, item.title),
            "first": coalesce(item.stock, user.level, -1),
            "packed": pack(user.level, item.stock),
            "shared": user.likes.overlap(item.tags),
            "has": user.likes.has(item.stock),
            "of_user": user.level,
        },
        COLUMNS,
        [0, 1, 1],
        2,
    )
    assert found == {
        "sum": [11, None, None],
        "dot": [1.0, None, 8.0],
        "text": ["ua", "vb", "vc"],
        "first": [1, 2, -1],
        "packed": [[10.0, 1.0], None, None],
        "shared": [1, 0, None],
        "has": [True, False, None],
        "of_user": [10, None],
    }


def test_constants_have_a_row_per_request() -> None:
    found = run({"one": pack(1, 2), "text": concat("a", "b"), "none": Expression("floor_divide", (1, 0))}, {}, [0], 2)
    assert found == {"one": [[1.0, 2.0]] * 2, "text": ["ab"] * 2, "none": [None, None]}
    assert run({"one": pack(1, 2)}, {}, [], 0) == {"one": []}


def test_constants_meet_every_level() -> None:
    found = run(
        {
            "of_item": coalesce(item.stock, 0) + 1,
            "of_events": events.sum(1),
            "chosen": if_else(True, item.stock, 5),
            "listed": events.collect(events.time).differences() + 1,
            "where": events.where(True).count(),
            "nowhere": events.where(Expression("equal", (1, 2))).count(),
        },
        COLUMNS | {("event", "time"): Column.of(FeatureType("time"), [0, 50, 150])},
        [0, 1, 1],
        2,
    )
    assert found == {
        "of_item": [2, 3, 1],
        "of_events": [2, 3],
        "chosen": [1, 2, None],
        "listed": [[1, 51], [1, 51, 101]],
        "where": [2, 3],
        "nowhere": [0, 0],
    }


def test_no_candidates_and_no_events() -> None:
    columns = {
        key: column.take(np.zeros(0, dtype=np.int64)) if key[0] == "item" else column for key, column in COLUMNS.items()
    }
    found = run(
        {"sum": user.level + item.stock, "user": user.level, "text": concat(user.name, item.title)}, columns, [], 2
    )
    assert found == {"sum": [], "user": [10, None], "text": []}


def test_a_source_that_the_data_does_not_have_names_feature_and_line() -> None:
    with pytest.raises(DataError) as error:
        run({"a": item.price + 1, "b": item.price * 2}, {}, [0], 1)
    assert error.value.got.startswith("feature a and 1 more (test_execution.py:")
    assert error.value.got.endswith("): item.price is not in the data")
    assert error.value.fix == "add price to the data, or remove the feature"


@pytest.mark.parametrize(
    ("expression", "values", "message", "allowed"),
    [
        (item.price, [5.0, -1.0, None], "item.price is -1.0; 1 of 2 values", "declared range: 0 to 100"),
        (item.price, [101.0, -1.0, 7.0], "is 101.0; 2 of 3 values", "declared range: 0 to 100"),
        (item.price, [float("inf"), 0.0, 0.0], "is inf; 1 of 3 values", "declared range: 0 to 100"),
        (item.stock, [10, 2**63 - 1, 0], "item.stock is 10; 2 of 3 values", "declared range: -∞ to 9"),
    ],
)
def test_a_value_outside_its_declared_range(
    expression: Expression, values: list[Any], message: str, allowed: str
) -> None:
    type_ = FLOAT if expression.params["column"] == "price" else INT
    with pytest.raises(DataError) as error:
        run({"a": expression + 1}, {("item", expression.params["column"]): Column.of(type_, values)}, [0, 0, 0], 1)
    assert error.value.got.startswith("feature a (test_execution.py:") and message in error.value.got
    assert error.value.allowed == allowed


def test_nan_missing_and_bounds_themselves_are_within_a_range() -> None:
    fine = Column.of(FLOAT, [float("nan"), None, 0.0, 100.0])
    assert run({"a": item.price.is_missing()}, {("item", "price"): fine}, [0] * 4, 1)["a"] == [
        False,
        True,
        False,
        False,
    ]
    hidden = Column(FLOAT, np.array([-9.0]), present=np.array([False]))
    assert run({"a": item.price}, {("item", "price"): hidden}, [0], 1)["a"] == [None]


def test_two_ranges_of_one_column_both_hold() -> None:
    narrow = Item(price=Float(minimum=50, maximum=100))
    column = {("item", "price"): Column.of(FLOAT, [20.0])}
    with pytest.raises(DataError, match="declared range: 50 to 100"):
        run({"a": item.price, "b": narrow.price}, column, [0], 1)


def test_no_warnings_whatever_the_numbers() -> None:
    columns = {("item", "stock"): Column.of(INT, [0, -(2**63), None])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(
            {"a": (item.stock / 0).log() + (item.stock * 2**62).exp(), "b": Expression("divide", (1, 0))},
            columns,
            [0] * 3,
            1,
        )
    assert found["b"] == [float("inf")] and found["a"][2] is None


def test_a_program_can_be_made_again_from_its_plan() -> None:
    """Data loaders start processes, and functions do not travel to them."""
    program = Program(compile_features({"a": item.stock + 1, "b": events.count()}))
    again = copy.deepcopy(program)
    assert again is not program
    assert again.plan == program.plan
