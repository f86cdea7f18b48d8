"""Expressions: building one computes nothing, checks nothing, and remembers the line."""

from __future__ import annotations

import copy
import json
import math
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.features.entities import Events, Float, Int, Item
from tackboard.features.expressions import (
    NOWHERE,
    PACKAGE,
    CodePlace,
    Duration,
    Expression,
    as_expression,
    caller_place,
    duration_ms,
)
from tackboard.features.language import days, feature, hours, milliseconds, minutes, seconds

A, B = as_expression(1), as_expression("b")


def shape(expression: Expression) -> tuple[Any, ...]:
    """An expression as (operator, parameters, inputs), constants as themselves."""
    if expression.op == "constant":
        return (expression.params["value"],)
    return (expression.op, expression.params, [shape(argument) for argument in expression.args])


@pytest.mark.parametrize(
    ("apply", "name"),
    [
        (operator.add, "add"),
        (operator.sub, "subtract"),
        (operator.mul, "multiply"),
        (operator.truediv, "divide"),
        (operator.floordiv, "floor_divide"),
        (operator.mod, "modulo"),
        (operator.and_, "and"),
        (operator.or_, "or"),
        (operator.eq, "equal"),
        (operator.ne, "not_equal"),
        (operator.lt, "less"),
        (operator.le, "less_equal"),
        (operator.gt, "greater"),
        (operator.ge, "greater_equal"),
    ],
)
def test_python_operators_on_either_side(apply: Callable[[Any, Any], Expression], name: str) -> None:
    assert shape(apply(A, 7)) == (name, {}, [(1,), (7,)])
    mirrored = {"less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal"}
    if name in mirrored:
        assert shape(apply(7, A)) == (mirrored[name], {}, [(1,), (7,)])
    elif name in ("equal", "not_equal"):
        assert shape(apply(7, A)) == (name, {}, [(1,), (7,)])
    else:
        assert shape(apply(7, A)) == (name, {}, [(7,), (1,)])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (A.is_in((1, 2)), ("is_in", {"values": [1, 2]})),
        (A.fill_missing(0), ("fill_missing", {"value": 0})),
        (A.fill_missing(()), ("fill_missing", {"value": []})),
        (A.missing_if(-1), ("missing_if", {"value": -1})),
        (A.bucket_hash(10), ("bucket_hash", {"num_buckets": 10, "seed": 0})),
        (A.index_in(("x",)), ("index_in", {"names": ["x"]})),
        (A.clip(0, None), ("clip", {"low": 0, "high": None})),
        (A.normalise(mean=1, std=2), ("normalise", {"mean": 1, "std": 2})),
        (A.bucketize((1, 2)), ("bucketize", {"boundaries": [1, 2]})),
        (A.contains_text("x"), ("contains_text", {"text": "x"})),
        (A.hour(), ("hour", {"zone": "UTC"})),
        (A.weekday("Asia/Tokyo"), ("weekday", {"zone": "Asia/Tokyo"})),
        (A.minute_of_day(), ("minute_of_day", {"zone": "UTC"})),
        (A.at(-1), ("at", {"index": -1})),
        (A.take(3), ("take", {"count": 3})),
    ],
)
def test_methods(expression: Expression, expected: tuple[str, dict[str, Any]]) -> None:
    assert shape(expression) == (*expected, [(1,)])


def test_durations_are_whole_milliseconds() -> None:
    assert (days(7), hours(1), minutes(1)) == (604_800_000, 3_600_000, 60_000)
    assert days(0.5) == hours(12) and isinstance(days(1 / 3), int)
    assert (seconds(1.5), milliseconds(7)) == (1500, 7)
    assert days(-1) == -86_400_000, "the compiler refuses it, naming the line"


def test_durations_stay_durations_and_are_plain_numbers_in_json() -> None:
    for made in (days(1) + hours(2), days(1) - hours(2), 2 * hours(11), hours(11) * 2):
        assert isinstance(made, Duration) and made in (hours(26), hours(22))
    for plain in (days(1) + 5, 5 + days(1), days(1) - 5, days(1) * 0.5, days(1) // 2):
        assert not isinstance(plain, Duration)
    assert json.dumps({"ms": seconds(2)}) == '{"ms": 2000}'
    assert [type(one) for one in duration_ms("within({})", days(1))] == [int]


@pytest.mark.parametrize("count", ["7", None, True, math.nan, math.inf, 1e308, A, [7]])
def test_a_duration_is_a_number_of_something(count: Any) -> None:
    with pytest.raises(UsageError, match=r"test_expressions\.py:\d+: days\(") as error:
        days(count)
    assert error.value.allowed == "a number: days(7)"


@pytest.mark.parametrize(
    ("wrong", "got", "fix"),
    [
        (lambda: A.log1pp(), "there is no operator log1pp", "did you mean log1p?"),
        (lambda: A.fillmissing(0), "there is no operator fillmissing", "did you mean fill_missing?"),
        (lambda: A.concat(B), "there is no operator concat", 'it is written concat(a, b, ..., separator="")'),
        (lambda: A.count(), "there is no operator count", "it is written events.count()"),
        (lambda: A.xqz(), "there is no operator xqz", "docs/features.md lists the operators"),
        (lambda: A(1), "a feature is called like a function", "put an operator before the ("),
        (lambda: Events().cuont(), "events has no column or operator cuont", "did you mean count?"),
        (lambda: Item(price=Float).prise(), "item has no column or operator prise", "did you mean price?"),
        (lambda: Item(price=Float).price(), "item.price is a column, not an operator", "write item.price without ()"),
        (lambda: Events(count=Int)["count"](), 'events["count"] is a column', "the operator is events.count(…)"),
        (lambda: feature(A), "feature(an expression", ""),
    ],
)
def test_what_is_no_operator(wrong: Callable[[], object], got: str, fix: str) -> None:
    with pytest.raises(UsageError) as error:
        wrong()
    assert error.value.got.startswith(f"test_expressions.py:{wrong.__code__.co_firstlineno}: {got}")
    assert error.value.fix == fix


def test_python_can_ask_what_an_expression_has() -> None:
    assert hasattr(A, "log1p") and not hasattr(A, "log1pp") and not hasattr(A, "__array__")
    assert getattr(A, "shape", None) is None
    for twin in (copy.copy(A + 1), copy.deepcopy(A + 1)):
        assert shape(twin) == shape(A + 1)
    with pytest.raises(AttributeError):
        getattr(Expression.__new__(Expression), "op")  # noqa: B009
    assert re.fullmatch(r"an expression \(test_expressions\.py:\d+\)", repr(A))
    assert np.array(A, dtype=object).shape == ()


def test_an_expression_has_no_truth_value_and_no_loop() -> None:
    for wrong in (lambda: bool(A), lambda: A and B, lambda: not A, lambda: 0 < A < 3, lambda: A in [B]):
        with pytest.raises(UsageError, match="no truth value") as error:
            wrong()
        assert "test_expressions.py:" in error.value.got and "parentheses" in error.value.allowed
        assert ".is_in([…])" in error.value.fix and "if_else(" in error.value.fix
    with pytest.raises(UsageError, match="cannot be looped over"):
        list(A)
    with pytest.raises(UsageError, match="cannot be looped over"):
        sum(A)


def test_expressions_are_hashable_by_identity() -> None:
    other = as_expression(1)
    assert len({A, A, other}) == 2
    assert A.__hash__() == object.__hash__(A)


def test_the_line_is_the_users() -> None:
    line = sys._getframe().f_lineno
    made = A + 1
    chain = (
        A.log()
        .exp()
    )  # fmt: skip
    assert made.place == CodePlace(__file__, line + 1)
    assert str(made.place) == f"test_expressions.py:{line + 1}"
    assert chain.args[0].place.line == line + 3 and line + 3 <= chain.place.line <= line + 4
    assert made.args[1].place == made.place, "a constant stands on the line of what it is written in"
    assert str(NOWHERE) == "features.json"
    assert caller_place() == CodePlace(__file__, line + 11)


def test_a_file_beside_the_package_is_the_users() -> None:
    """Only files inside the package are passed over, not those whose path begins like it."""
    file = PACKAGE.rstrip("/") + "_mine/home.py"
    names: dict[str, Any] = {"A": A}
    exec(compile("made = A + 1", file, "exec"), names)  # noqa: S102
    assert names["made"].place == CodePlace(file, 1)


def test_a_description_does_not_change_what_is_computed() -> None:
    made = A + 1
    told = made.described("one more")
    assert shape(told) == shape(made) and told.text == "one more" and made.text == "" and told.place == made.place
