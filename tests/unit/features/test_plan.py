"""The compiler: sharing, levels and types, and errors that name the feature and the line."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import Any

import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.features import plan as plan_module
from tackboard.features.entities import FUTURE
from tackboard.features.execution import Program
from tackboard.features.expressions import NOWHERE, Expression
from tackboard.features.language import (
    Context,
    Events,
    Float,
    Id,
    Int,
    Item,
    List,
    Request,
    String,
    User,
    Vector,
    coalesce,
    cross,
    days,
    feature,
    if_else,
    milliseconds,
    pack,
    sequence,
)
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.plan import (
    CANDIDATE,
    CONSTANT,
    REQUEST,
    PlanBuilder,
    SpecError,
    compile_features,
    compile_nodes,
    listed,
)

item = Item(
    price=Float(minimum=0), stock=Int, category=String, maker=Id, look=Vector(3), tags=List(Id), shelf=Int(default=0)
)
user = User(country=String, taste=Vector(3))
events = Events(dwell_ms=Int, value=Float, note=String)
context = Context(device=String)
request = Request()
FILE = "test_plan.py"


def failing(expression: Any) -> SpecError:
    """The error of a set whose feature `wrong` is `expression`."""
    with pytest.raises(SpecError) as error:
        compile_features({"fine": item.stock, "wrong": expression})
    assert error.value.exit_code == 2
    assert all("\n" not in line for line in (error.value.got, error.value.allowed, error.value.fix))
    return error.value


# Errors name feature and line.


@pytest.mark.parametrize(
    ("expression", "got", "allowed", "fix"),
    [
        (item.prise, "item has no column prise", "declared: id, price, stock", "did you mean item.price?"),
        (item.zzzzz, "item has no column zzzzz", "declared: id, price", "declare it: item = Item(zzzzz=…)"),
        (user.contry, "user has no column contry", "declared: id, country, taste", "did you mean user.country?"),
        (context.os, "context has no column os", "declared: device", "declare it: context = Context(os=…)"),
        (request.tim, "request has no column tim", "declared: time", "did you mean request.time?"),
        (events.last(events.itm), "events has no column itm", "declared: item, action", "did you mean events.item?"),
        (events.last(events.dwel_ms), "events has no column dwel_ms", "dwell_ms", "did you mean events.dwell_ms?"),
    ],
)
def test_an_unknown_column_is_named_with_what_is_near(expression: Expression, got: str, allowed: str, fix: str) -> None:
    error = failing(expression)
    assert error.got.startswith(f"feature wrong ({FILE}:") and error.got.endswith(got)
    assert allowed in error.allowed and error.fix == fix


@pytest.mark.parametrize("column", FUTURE)
def test_columns_counted_over_the_whole_log_look_into_the_future(column: str) -> None:
    for expression in (item[column], user[column], Item(**{column: Int})[column]):
        error = failing(expression)
        assert f"feature wrong ({FILE}:" in error.got and f".{column} looks into the future" in error.got
        assert "events.count()" in error.fix


@pytest.mark.parametrize(
    "expression",
    [
        events.within(milliseconds(-1)).count(),
        events.within(days(-7)).count(),
        events.between(milliseconds(-1), milliseconds(0)).count(),
        events.between(days(7), milliseconds(-1)).count(),
        events.decayed_sum(1, half_life=milliseconds(-5)),
    ],
)
def test_a_negative_window_looks_into_the_future(expression: Expression) -> None:
    error = failing(expression)
    assert f"feature wrong ({FILE}:" in error.got and "looks into the future" in error.got
    assert error.fix == "give the age of the events, 0 or more"


@pytest.mark.parametrize(
    ("expression", "spelling", "got"),
    [
        (item.price + item.category, "a + b", "it is given float? and string?"),
        (item.price.lower(), "a.lower()", "it is given float?"),
        (item.maker + 1, "a + b", "it is given id? and int"),
        (item.maker == "x", "a == b", "it is given id? and string"),
        (request.time - request.time, "a - b", "it is given time and time"),
        (item.category < "b", "a < b", "it is given string? and string"),
        (item.price & True, "a & b", "it is given float? and bool"),
        (if_else(item.stock, 1, 2), "if_else(condition, a, b)", "the condition is int?"),
        (if_else(True, item.price, "x"), "if_else(condition, a, b)", "it is given float? and string"),
        (item.look.dot(pack(1, 2)), "a.dot(b)", "vector[3]? and vector[2]"),
        (item.look.at(3), "a.at(index)", "vector[3]? has no component 3"),
        (item.category.fill_missing(3), "a.fill_missing(value)", "'3' is not a value of type string"),
        (item.price.normalise(mean=0, std=0), "a.normalise(mean=, std=)", "std is 0"),
        (item.price.bucketize([2, 1]), "a.bucketize(boundaries)", "boundary 1 follows 2"),
        (item.price.clip(5, 1), "a.clip(low, high)", "low is 5 and high is 1"),
        (request.time.hour("Europe/Berln"), "t.hour(zone)", "'Europe/Berln' is not a time zone"),
        (item.price.hash_id(), "a.hash_id()", "it is given float?"),
        (coalesce(item.price), "coalesce(a, b, ...)", "it is given 1 value"),
        (events.where(events.dwell_ms).count(), "events.where(condition)", "it is given int?"),
        (events.sum(events.item), "events.sum(column)", "it is given id"),
        (events.max(events.action), "events.max(column)", "it is given string"),
        (events.collect(events.dwell_ms), "events.collect(column)", "the column is int?"),
        (events.collect(pack(events.value.fill_missing(0.0))), "events.collect(column)", "it is given vector[1]"),
        (events.matching(events.item, item.category).count(), "events.matching(column, value)", "id is matched"),
        (item.price + 2**63, "constant", "does not fit into 64 bits"),
        (Expression("add", (item.price, [1])), "constant", "list is not a value of a feature"),
        (item.price + None, "constant", "NoneType is not a value of a feature"),
        (item.price.fill_missing({1}), "a.fill_missing(value)", "its parameter value is set"),
        (sequence(**{"a b": events.collect(events.item)}), "sequence(name=list, …)", "its columns are named"),
        (Expression("nosuch", (item.price,)), "nosuch", "there is no operator 'nosuch'"),
        (Expression("ad", (1, 2)), "ad", "there is no operator 'ad'"),
        (Expression("add", (1, 2, 3)), "a + b", "it is given 3 inputs"),
        (Expression("log", (1,), {"by": 2}), "a.log()", "its parameters are by"),
    ],
)  # fmt: skip
def test_a_type_clash_names_feature_line_and_operator(expression: Expression, spelling: str, got: str) -> None:
    error = failing(expression)
    assert error.got.startswith(f"feature wrong ({FILE}:")
    assert f"), {spelling}: " in error.got and got in error.got


def test_the_line_is_that_of_the_operator_and_not_of_the_feature() -> None:
    line = sys._getframe().f_lineno
    clash = item.price + item.category
    deep = (clash * 2).log()
    with pytest.raises(SpecError) as error:
        compile_features({"wrong": deep})
    assert error.value.got.startswith(f"feature wrong ({FILE}:{line + 1}), a + b:")


def test_an_operator_that_is_nearly_right_is_suggested() -> None:
    assert failing(Expression("lowr", (item.category,))).fix == "did you mean lower?"
    assert failing(Expression("zzzzzz")).fix == "use a newer tackboard"


# Parameters, levels, declarations.


@pytest.mark.parametrize(
    ("expression", "got"),
    [
        (events.within(milliseconds(0)).count(), "duration_ms = 0 ms"),
        (events.within(days(365 * 300)).count(), "duration_ms ="),
        (events.between(milliseconds(5), milliseconds(5)).count(), "oldest_ms = 5 is not above newest_ms = 5"),
        (events.newest(0).count(), "count = 0"),
        (events.newest(10**7).count(), "count = 10000000"),
        (events.anchored(0, 1).count(), "count = 0"),
        (events.anchored(8, 9).count(), "stride = 9"),
        (events.anchored(8, True).count(), "stride = True"),
        (events.top(events.item, 0), "count = 0"),
        (events.top(events.item, "3"), "count = '3'"),
        (events.dwell_ms + item.stock, "it mixes a column of the events with a value of the request"),
        (events.time.seconds_since(request.time), "it mixes a column of the events"),
        (events.where(events.item == item.maker).count(), "it mixes a column of the events"),
        (events.where(item.stock > 0).count(), "it is given a value of the candidate"),
        (events.where(request.time.hour() > 3).count(), "it is given a value of the request"),
        (events.sum(events.count()), "it is given a value of the request"),
        (events.matching(events.item, events.item).count(), "the value to match is a column of the events"),
        (events.matching(item.id, item.id).count(), "it is given a value of the candidate"),
        (events.collect(events.item) + item.stock, "it is given a list and int?"),
        (events.collect(events.time) == events.newest(2).collect(events.time), "two lists of different events"),
        (sequence(a=events.collect(events.item), b=events.newest(3).collect(events.item)), "lists of different events"),
        (sequence(a=item.stock), "its column a is int?"),
        (item.tags == 3, "it is given list[id]?"),
        (Expression("log", (Expression("events"),)), "it is given events"),
        (Expression("count", (item.price,)), "its first input is not a selection of events"),
        (events.collect(events.action).index_in(["a"]) // 2, "it may give missing elements"),
        (pack(events.collect(events.value.fill_missing(0.0))), "it is given list[float]"),
        (Item(price=Float(minimum=float("nan"))).price, "minimum = nan"),
        (Item(price=Float(maximum="9")).price, "maximum = '9'"),
        (Item(price=Float(minimum=True)).price, "minimum = True"),
        (Item(price=Float(minimum=2, maximum=1)).price, "minimum = 2 is above maximum = 1"),
        (Item(price=Float(minimum=0, default=-1.0)).price, "default = -1.0 is outside the declared range"),
        (Item(stock=Int(maximum=5, default=6)).stock, "default = 6 is outside the declared range"),
        (Item(price=Float(default="x")).price, "'x' is not a value of type float"),
        (Item(price=Float(default=math.nan)).price, "'nan' is not a value of type float"),
        (Item(stock=Int(default=0.5)).stock, "'0.5' is not a value of type int"),
        (Item(stock=Int(default=2**63)).stock, "is not a value of type int"),
        (Item(category=String(default=3)).category, "'3' is not a value of type string"),
        (Item(look=Vector(0)).look, "is not a feature type"),
        (Item(look=Vector(65_537)).look, "a column cannot be vector[65537]?"),
        (Item(id=Int).id, "item.id is id, but declared as int?"),
        (events.collect(Events(time=Int).time), "events.time is time, but declared as int?"),
        (Events(look=Vector(3)).last(Events(look=Vector(3)).look), "a column of the events cannot be vector[3]?"),
        (item.stock + Item(stock=Float).stock, "item.stock is declared in two ways"),
        (item.stock + Item(stock=Int(default=0)).stock, "item.stock is declared in two ways"),
        (item.price + math.nan, "nan is not a finite number"),
        (item.price + math.inf, "inf is not a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(expression: Expression, got: str) -> None:
    assert got in failing(expression).got


def test_ranges_may_differ_and_the_same_declaration_may_repeat() -> None:
    prices = (Item(price=Float()), Item(price=Float(minimum=0, maximum=0)), Item(price=Float()))
    assert compile_features({f"p{number}": one.price for number, one in enumerate(prices)})


def test_a_feature_is_a_value_of_a_request_or_candidate() -> None:
    assert "is a column of the events, not a value of the request" in failing(events.action).got
    assert "is a selection of events" in failing(events.newest(3)._view).got
    for error in (failing(events.action), failing(Expression("events"))):
        assert error.got.startswith(f"feature wrong ({FILE}:") and "aggregate" in error.allowed


def test_levels_are_the_highest_of_the_inputs() -> None:
    plan = compile_features(
        {
            "constant": pack(1, 2),
            "of_user": user.country.lower(),
            "of_events": events.count() + 1,
            "of_item": item.price * 2,
            "mixed": user.taste.dot(item.look),
            "matched": events.matching(events.item, item.id).count(),
            "matched_context": events.matching(events.action, context.device).count(),
            "matched_constant": events.matching(events.action, "click").count(),
        }
    )
    levels = {name: plan.nodes[index].level for name, index in plan.features.items()}
    assert levels == {
        "constant": CONSTANT,
        "of_user": REQUEST,
        "of_events": REQUEST,
        "of_item": CANDIDATE,
        "mixed": CANDIDATE,
        "matched": CANDIDATE,
        "matched_context": REQUEST,
        "matched_constant": REQUEST,
    }


def test_lists_of_the_same_events_may_be_combined() -> None:
    recent = events.newest(3)
    gaps = recent.collect(events.time).differences()
    plan = compile_features({"x": sequence(a=gaps.bucketize([0]), b=recent.collect(events.item))})
    assert str(plan.nodes[plan.features["x"]].type) == "sequence{a: int, b: id}"
    assert compile_features({"x": gaps + recent.collect(events.dwell_ms.fill_missing(0))})


# References between features.


def test_features_refer_to_each_other_in_any_order() -> None:
    plan = compile_features({"c": feature("b") + 1, "b": feature("a") * 2, "a": item.stock, "same": feature("a")})
    assert list(plan.features) == ["c", "b", "a", "same"]
    assert plan.features["same"] == plan.features["a"]


@pytest.mark.parametrize(
    ("features", "circle"),
    [
        ({"a": feature("a")}, "a → a"),
        ({"a": feature("b"), "b": feature("a")}, "a → b → a"),
        ({"x": feature("a"), "a": feature("b") + 1, "b": feature("c").log(), "c": feature("a")}, "a → b → c → a"),
    ],
)
def test_a_circle_is_shown(features: dict[str, Expression], circle: str) -> None:
    with pytest.raises(SpecError) as error:
        compile_features(features)
    assert error.value.got.startswith(f"feature a ({FILE}:") and error.value.got.endswith(
        f"depends on itself: {circle}"
    )
    assert error.value.fix == "remove one of the references"


def test_a_reference_to_nothing() -> None:
    error = failing(feature("fien") + 1)
    assert f"feature wrong ({FILE}:" in error.got and "refers to a feature 'fien', which does not exist" in error.got
    assert error.fix == "did you mean fine?"
    assert failing(feature("zzz")).fix == ""
    with pytest.raises(SpecError) as only:
        compile_features({"ab": feature("a b") + 1, "other": item.price})
    assert only.value.fix == "" and only.value.allowed == "other features: other", "never the feature itself"


def test_nested_too_deeply() -> None:
    deep = item.stock
    for _ in range(1_500):
        deep = deep + 1
    error = failing(deep)
    assert error.got.startswith(f"feature wrong ({FILE}:") and "is nested too deeply" in error.got


def test_too_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MAX_NODES", 50)
    with pytest.raises(SpecError, match="more than 50 operations"):
        compile_features({f"f{number}": item.stock + number for number in range(26)})


# Sharing, trimming, explaining.


def test_equal_expressions_are_computed_once() -> None:
    plan = compile_features(
        {
            "a": item.price.fill_missing(0.0).log1p(),
            "b": item.price.fill_missing(0.0).log1p() * 2,
            "c": events.within(days(7)).count(),
            "d": events.within(days(7)).count() + 1,
        }
    )
    assert [node.op for node in plan.nodes].count("log1p") == 1
    assert [node.op for node in plan.nodes].count("within") == 1


def test_constants_that_look_equal_in_python_are_not() -> None:
    values = (1, 1.0, True, 0.0, -0.0)
    plan = compile_features({f"f{number}": item.price == value for number, value in enumerate(values)})
    assert len([node for node in plan.nodes if node.op == "constant"]) == 5


def test_trimming_keeps_what_is_needed_and_its_order() -> None:
    features = {
        "a": item.price + 1,
        "b": sequence(x=events.newest(2).collect(events.item), y=events.newest(2).collect(events.time)),
        "c": feature("a") * 2,
        "d": user.country.lower(),
    }
    plan = compile_features(features)
    trimmed = plan.trimmed(["c", "b", "c"])
    assert list(trimmed.features) == ["c", "b"]
    assert {node.params["column"] for _, node in trimmed.sources()} == {"price", "item", "time"}
    direct = compile_features({"a": features["a"], "b": features["b"], "c": features["c"]})
    assert len(trimmed.nodes) == len(direct.nodes)
    assert plan.trimmed(plan.features).nodes == plan.nodes
    with pytest.raises(UsageError) as error:
        plan.trimmed(["aa"])
    assert error.value.got == "there is no feature aa" and error.value.fix == "did you mean a?"


def test_what_a_plan_needs() -> None:
    price, count = compile_features({"a": item.price}), compile_features({"a": events.count()})
    assert count.reads_events and not count.needs_event_times
    assert not price.reads_events and not price.needs_request_time and price.newest_events is None
    assert compile_features({"a": events.within(milliseconds(5)).count()}).needs_event_times
    assert compile_features({"a": request.time.hour()}).needs_request_time
    assert compile_features({"a": events.newest(3).count(), "b": events.newest(9).count()}).newest_events == 9
    assert compile_features({"a": events.newest(3).count(), "b": events.anchored(9, 2).count()}).newest_events == 9
    assert compile_features({"a": events.newest(3).count(), "b": events.count()}).newest_events is None


def test_readers_and_sources_are_named() -> None:
    plan = compile_features({"a": item.price + 1, "b": feature("a") * item.price, "c": item.stock})
    index = next(index for index, node in plan.sources() if node.params["column"] == "price")
    assert plan.readers(index) == ["a", "b"]
    assert plan.describe_source(index).startswith(f"feature a and 1 more ({FILE}:")
    assert plan.describe_source(index).endswith("): item.price")


def test_explain_shows_levels_types_sharing_and_names() -> None:
    logarithm = item.price.log()
    text = compile_features(
        {"hour": request.time.hour(), "a": logarithm + 1, "b": item.price.log() + events.count()}
    ).explain()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert '%1 request int hour(%0, zone="UTC") → hour' in lines
    assert "%3 candidate float? log(%2) shared ×2" in lines
    assert "%5 candidate float? add(%3, %4) → a" in lines
    nodes = "9 nodes (1 constants, 4 per request, 4 per candidate)"
    assert lines[-1] == f"3 features, {nodes}; 1 computations saved by sharing"
    long = compile_features({"a": item.category.is_in([f"name {number}" for number in range(50)])}).explain()
    assert "…" in long and max(len(line) for line in long.splitlines()) < 160


def test_three_hundred_features_compile_within_a_second() -> None:
    columns = {f"c{number}": Float() for number in range(100)}
    wide = Item(**columns)
    features: dict[str, Expression] = {}
    for number in range(100):
        value = wide[f"c{number}"].fill_missing(0.0)
        chosen = events.where(events.action == f"a{number % 7}").within(days(1 + number % 30))
        features[f"scaled{number}"] = value.clip(0.0, 9.0).log1p().normalise(mean=1.0, std=2.0)
        features[f"count{number}"] = chosen.count() / (1 + events.within(days(1 + number % 30)).count())
        features[f"crossed{number}"] = cross(value.bucketize([0.0, 1.0]), chosen.last(events.item).fill_missing(0))
    start = time.perf_counter()
    plan = compile_features(features)
    Program(plan)
    assert len(plan.features) == 300
    assert time.perf_counter() - start < 1.0


# What comes from a file.


def nodes_of(features: dict[str, Expression]) -> tuple[list[Any], dict[str, int]]:
    plan = compile_features(features)
    nodes = [{"op": node.op, "args": list(node.args), "params": dict(node.params)} for node in plan.nodes]
    return nodes, dict(plan.features)


def test_nodes_compile_to_the_same_plan() -> None:
    written = {"a": item.price.log(), "b": events.newest(3).collect(events.item)}
    plan = compile_nodes(*nodes_of(written))
    assert plan.nodes == tuple(dataclasses.replace(node, place=NOWHERE) for node in compile_features(written).nodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "nosuch"}, "feature a (features.json), nosuch: there is no operator 'nosuch'"),
        ({"op": 3}, "operation 1 of the feature set is malformed, or an input does not come before it"),
        ({"args": [1]}, "operation 1 of the feature set is malformed, or an input does not come before it"),
        ({"args": [-1]}, "an input does not come before it"),
        ({"args": [True]}, "an input does not come before it"),
        ({"args": {}}, "an input does not come before it"),
        ({"args": []}, "it is given 0 inputs"),
        ({"params": []}, "an input does not come before it"),
        ({"params": {"base": 2}}, "its parameters are base"),
        ({"line": "x"}, "operation 1 of the feature set cannot be read"),
        ({"line": float("inf")}, "operation 1 of the feature set cannot be read"),
        ({"op": "lower"}, "feature a (features.json), a.lower(): it is given float?"),
        ({"op": "lower", "line": 7, "file": "home.py"}, "feature a (home.py:7), a.lower(): it is given float?"),
        ({"op": "constant", "params": {"value": None}}, "NoneType is not a value of a feature"),
        ({"op": "constant", "params": {}}, "NoneType is not a value of a feature"),
        ({"op": "source", "params": {}}, "there is no entity None"),
        ({"op": "source", "params": {"entity": ["item"], "column": "x"}}, "parameters that it does not take"),
        (
            {"op": "source", "params": {"entity": "item", "column": "x", "type": {"kind": "int"}}},
            "a column without a default must be nullable",
        ),
        (
            {"op": "source", "params": {"entity": "item", "column": "num_events", "type": {"kind": "int"}}},
            "item.num_events looks into the future",
        ),
        (
            {"op": "source", "params": {"entity": "user", "column": "x", "type": {"kind": "string"}, "minimum": 0}},
            "user.x is string with a minimum",
        ),
    ],
)
def test_a_changed_node_is_refused(change: dict[str, Any], message: str) -> None:
    nodes, features = nodes_of({"a": item.price.log()})
    nodes[1] |= change
    with pytest.raises(DataError) as error:
        compile_nodes(nodes, features)
    assert message in str(error.value) and error.value.exit_code == 3


@pytest.mark.parametrize("index", [-1, 2, True, "1", None, 1.0])
def test_a_feature_names_an_operation_that_exists(index: Any) -> None:
    nodes, _ = nodes_of({"a": item.price.log()})
    with pytest.raises(DataError, match="feature a names operation"):
        compile_nodes(nodes, {"a": index})


def test_a_feature_of_a_file_is_a_value_of_a_request() -> None:
    nodes, _ = nodes_of({"a": events.last(events.item)})
    for index, node in enumerate(nodes):
        if node["op"] in ("events", "source"):
            with pytest.raises(DataError, match="feature a is not a value of a request"):
                compile_nodes(nodes, {"a": index})


@pytest.mark.parametrize("node", [None, 3, [], "x", {}, {"args": []}])
def test_a_node_that_is_none(node: Any) -> None:
    with pytest.raises(DataError, match="operation 0 of the feature set"):
        compile_nodes([node], {})


def test_every_operator_refuses_inputs_it_does_not_take() -> None:
    """Whatever a file says, a rule answers with a type or a TypeClash."""
    for name in REGISTRY:
        for values in ((), (1,), ("a", 2), (1.5, True, "x")):
            builder = PlanBuilder()
            args = tuple(builder.add("constant", (), {"value": value}, NOWHERE) for value in values)
            for params in ({}, {"value": []}, {"names": 3}):
                try:
                    builder.add(name, args, params, NOWHERE)
                except TypeClash as clash:
                    assert clash.got


def test_a_list_that_is_cut_says_so() -> None:
    many = {f"f{number}": item.price for number in range(20)}
    with pytest.raises(UsageError) as error:
        compile_features(many).trimmed(["zzz"])
    assert error.value.allowed.endswith("f14, f15 and 4 more")
    assert listed(["a", "b"]) == "a, b" and listed("abc", limit=2) == "a, b and 1 more"


@pytest.mark.parametrize(
    ("expression", "got", "advice"),
    [
        (item.price + events, "Events is not a value of a feature", "aggregate events: events.count()"),
        (events.sum(events.count), "count is an operator", 'for a column named count, write events["count"]'),
        (item.price + len, "len is an operator", "call it: len(…)"),
    ],
)
def test_what_is_no_value(expression: Expression, got: str, advice: str) -> None:
    error = failing(expression)
    assert error.got.endswith(f"), constant: {got}") and advice in error.fix


def test_a_source_that_is_not_in_the_data_says_where_it_would_come_from() -> None:
    plan = compile_features({"a": events.last(events.dwell_ms), "b": item.price.is_missing(), "c": user.country})
    at = {node.params["column"]: index for index, node in plan.sources()}
    error = plan.missing_source(at["dwell_ms"], ["dwell_s", "query"])
    assert error.got.endswith("): events.dwell_ms is not in the data") and "--field dwell_ms=COLUMN" in error.allowed
    assert error.fix == "did you mean events.dwell_s?"
    error = plan.missing_source(at["price"])
    assert "--items FILE" in error.allowed and error.fix == "add price to the data, or remove the feature"
    assert "--users FILE" in plan.missing_source(at["country"]).allowed


def test_advice_about_two_values_is_not_given_for_one() -> None:
    assert failing(user.country.log1p()).fix == "" and failing(request.time.log1p()).fix == ""
    assert "concat(a, b)" in failing(user.country + user.country).fix


def test_a_time_taken_from_another_needs_the_times_of_events() -> None:
    """Else a history without times would be as old as 1970, and nobody would be told."""
    away = request.time.seconds_since(events.last(events.time))
    assert compile_features({"a": away.fill_missing(-1.0)}).needs_event_times
    both_apart = compile_features({"hour": request.time.hour(), "times": events.newest(3).collect(events.time)})
    assert not both_apart.needs_event_times and both_apart.needs_request_time
