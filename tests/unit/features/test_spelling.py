"""What a plan is spelt as compiles to the same computation, whatever the operators and however they nest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features import language
from tackboard.features.expressions import Expression
from tackboard.features.feature_set import FeatureSet, node_digests
from tackboard.features.language import (
    Context,
    Events,
    Float,
    Int,
    Item,
    Request,
    String,
    User,
    coalesce,
    concat,
    cross,
    days,
    feature,
    if_else,
    milliseconds,
    pack,
    sequence,
)
from tackboard.features.operators import REGISTRY, Example
from tackboard.features.plan import Plan, compile_features, compile_nodes
from tackboard.features.reference import parse_type, read_example
from tackboard.features.spelling import duration, literal, source_name, spell

item = Item(price=Float(minimum=0), stock=Int(), title=String())
user = User(country=String())
events = Events(dwell_ms=Int(), count=Int())
context = Context(device=String())
request = Request()
EXAMPLES = [pytest.param(example, id=f"{name}-{number}") for name, one in REGISTRY.items()
            for number, example in enumerate(one.examples)]  # fmt: skip


def read(text: str, **names: Any) -> Expression:
    """The text as Python reads it: lines that name something, and an expression."""
    scope = {name: getattr(language, name) for name in language.__all__}
    scope |= {"item": item, "user": user, "events": events, "context": context, "request": request, "float": float}
    scope |= names
    blocks, lines = [], text.split("\n")
    while lines[0].startswith("v") and " = " in lines[0]:
        blocks.append(lines.pop(0))
        while lines[0].startswith((" ", ")")):
            blocks[-1] += "\n" + lines.pop(0)
    exec("\n".join([*blocks, "result = " + "\n".join(lines)]), scope)  # noqa: S102
    found = scope["result"]
    assert isinstance(found, Expression)
    return found


def hashes(plan: Plan) -> dict[str, str]:
    digests = node_digests(plan)
    return {name: digests[index] for name, index in plan.features.items()}


def assert_same(plan: Plan, **names: Any) -> None:
    """The text of every feature compiles to that feature's hash."""
    again = compile_features({name: read(spell(plan, name), **names) for name in plan.features})
    assert hashes(again) == hashes(plan)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_operator_is_spelt_as_it_is_written(example: Example) -> None:
    columns = {name: given for name, given in example.inputs.items() if name not in ("events", "request_ms")}

    class Inputs:
        """The candidate whose attributes are the inputs."""

    for name, (type_, _) in columns.items():
        params = {"entity": "item", "column": name, "type": parse_type(type_).to_json()}
        setattr(Inputs, name, Expression("source", (), params))
    plan = compile_features({"result": read_example(example)})
    assert_same(plan, item=Inputs)
    if not columns:
        assert spell(plan, "result").count("\n") > 0 or spell(plan, "result") == example.code


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (-(item.price + 1.0).abs(), "-(item.price + 1.0).abs()"),
        ((item.price - 1.0) - (item.price - 2.0), "item.price - 1.0 - (item.price - 2.0)"),
        (1.0 - item.price * 2, "1.0 - item.price * 2"),
        ((item.price == 1.0) & ~(item.price > 2.0), "(item.price == 1.0) & ~(item.price > 2.0)"),
        (((item.price == 1.0) == (item.stock == 1)), "(item.price == 1.0) == (item.stock == 1)"),
        ((item.price * -1.5).clip(None, 3), "(item.price * -1.5).clip(None, 3)"),
        ((-item.price).__neg__(), "-(-item.price)"),
        (item.title == 'a "b"\n\ud800', 'item.title == "a \\"b\\"\\n\\ud800"'),
        (events.sum(events["count"].fill_missing(0)), 'events.sum(events["count"].fill_missing(0))'),
        (events.between(days(7), milliseconds(90_001)).count(), "events.between(days(7), milliseconds(90001)).count()"),
        (concat(item.title, context.device, separator="/"), 'concat(item.title, context.device, separator="/")'),
        (
            cross(user.country, item.title).bucket_hash(10, 3),
            "cross(user.country, item.title).bucket_hash(10, seed=3)",
        ),
    ],
)
def test_brackets_and_constants(expression: Expression, text: str) -> None:
    plan = compile_features({"result": expression})
    assert spell(plan, "result") == text
    assert_same(plan)


def test_other_features_are_named_and_shared_parts_have_a_line() -> None:
    clicks = events.where(events.action == "click")
    features = FeatureSet(
        "home",
        clicks=clicks.count(),
        rate=clicks.count() / feature("all"),
        all=events.count(),
        price=item.price,
        cheap=item.price < 1.0,
        share=clicks.within(days(1)).count() / clicks.within(days(7)).count(),
        twin=events.count(),
    )
    assert spell(features.plan, "rate") == 'feature("clicks") / feature("all")'
    assert spell(features.plan, "all") == "events.count()"
    assert spell(features.plan, "twin") == "events.count()"
    assert spell(features.plan, "cheap") == "item.price < 1.0"
    assert spell(features.plan, "share").split("\n") == [
        'v1 = events.where(events.action == "click")',
        "v1.within(days(1)).count() / v1.within(days(7)).count()",
    ]
    assert_same(features.plan)


def test_long_calls_are_broken_into_lines() -> None:
    recent = events.newest(64)
    names = ["click", "save", "hide", "share", "comment"]
    plan = compile_features(
        {
            "history": sequence(
                item=recent.collect(events.item),
                action=recent.collect(events.action.index_in(names)),
                gap=recent.collect(events.time).differences().bucketize([1000, 2000]),
            )
        }
    )
    text = spell(plan, "history")
    assert text.split("\n")[1:3] == ["sequence(", "    item=v1.collect(events.item),"]
    assert_same(plan)


def test_a_deep_plan_is_spelt_line_by_line_and_grows_no_faster_than_the_plan() -> None:
    nodes: list[dict[str, Any]] = [
        {
            "op": "source",
            "args": [],
            "params": {"entity": "item", "column": "n", "type": {"kind": "int", "nullable": True}},
        }
    ]
    for number in range(5000):
        nodes.append({"op": "add", "args": [number, number if number % 2 else 0], "params": {}})
    text = spell(compile_nodes(nodes, {"deep": 5000}), "deep")
    assert len(text) < 60 * 5000


def test_columns_that_are_no_plain_names() -> None:
    assert source_name({"entity": "event", "column": "where"}) == 'events["where"]'
    assert source_name({"entity": "item", "column": "the price"}) == 'item["the price"]'
    assert source_name({"entity": "item", "column": "class"}) == 'item["class"]'
    assert source_name({"entity": "user", "column": "born"}) == "user.born"


def test_durations_and_literals() -> None:
    assert [duration(days(2)), duration(5_400_000), duration(0), duration(1)] == [
        "days(2)",
        "minutes(90)",
        "days(0)",
        "milliseconds(1)",
    ]
    assert literal([1, "é", None, True]) == '[1, "é", None, True]'


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """Numbers made of numbers, a few operators deep."""
    depth = draw(st.integers(0, 5))
    pool: list[Any] = [item.price.fill_missing(0.0), item.stock.fill_missing(1), events.count(), 2, -0.5]
    for _ in range(depth):
        left, right = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        if not isinstance(left, Expression):
            left = item.price.fill_missing(1.0)
        made = draw(
            st.sampled_from(
                [left + right, left - right, left * right, left / right, -left, left.abs(), left.log1p(),
                 if_else((left < right) | ~(left == right), left, right), coalesce(left, right),
                 pack(left, right).norm()]
            )
        )  # fmt: skip
        pool.append(made)
    return pool[-1] if isinstance(pool[-1], Expression) else pool[0]


@given(st.lists(expressions(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_expression_comes_back(made: list[Expression]) -> None:
    features = FeatureSet("x", **{f"feature_{number}": expression for number, expression in enumerate(made)})
    assert_same(features.plan)
    stored = json.loads(json.dumps(features.to_json(), sort_keys=True))
    assert_same(FeatureSet.from_json(stored).plan)
