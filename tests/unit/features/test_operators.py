"""The registry: every operator is documented, reachable from the language, and does what its examples say."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.features import expressions
from tackboard.features.batch_executor import BatchExecutor
from tackboard.features.column import differing_rows
from tackboard.features.entities import Events
from tackboard.features.expressions import Expression
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.operators import FAMILIES, REGISTRY, Example, TypeClash, any_missing, gives, need, register
from tackboard.features.plan import compile_features
from tackboard.features.reference import _data, read_example, run_example
from tackboard.features.types import BOOL, FLOAT, INT, STRING

DAY = expressions.days(1)
EXAMPLES = [
    pytest.param(example, id=f"{name}-{number}")
    for name, operator in REGISTRY.items()
    for number, example in enumerate(operator.examples)
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | dict) and type(one) is type(other) and len(one) == len(other):
        places = one if isinstance(one, dict) else range(len(one))
        return all(same(one[place], other[place]) for place in places)
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_gives_its_result_in_both_executors(example: Example) -> None:
    assert same(run_example(example), example.result)
    plan, (events, items, rows) = compile_features({"value": read_example(example)}), _data(example)
    batch = BatchExecutor(plan, events=events, items=items).compute(rows)["value"]
    moment = int(rows.request_ms[0])
    seen = np.flatnonzero(events.times < moment) if events else []
    online = OnlineExecutor(plan).compute(
        history={name: column.take(seen) for name, column in events.columns.items()} if events else {},
        request_ms=moment,
        item_ids=rows.item_ids,
        item=items.columns,
    )["value"]
    assert len(differing_rows(batch, online)) == 0


@pytest.mark.parametrize("name", REGISTRY)
def test_every_operator_is_documented(name: str) -> None:
    operator = REGISTRY[name]
    assert operator.name == name and operator.family in FAMILIES and operator.spelling
    assert operator.summary.endswith(".") and operator.examples


def test_no_two_operators_are_spelt_alike() -> None:
    spellings = [operator.spelling for operator in REGISTRY.values()]
    assert len(set(spellings)) == len(spellings)


def test_every_operator_can_be_written_in_the_language() -> None:
    """Every method of expressions and events, called with anything, gives an operator that exists, and all of them."""
    written: set[str] = set()
    anything = Expression("constant", (), {"value": 1})
    for owner in (anything, Events()):
        for name in dir(type(owner)):
            method = getattr(owner, name)
            if (name.startswith("_") and name not in OPERATOR_METHODS) or not callable(method):
                continue
            for arguments in ((), (anything,), (1, 2), ([],), (anything, 1), (DAY,), (DAY, DAY)):
                for named in ({}, {"mean": 0.0, "std": 1.0}, {"half_life": DAY}):
                    try:
                        made = method(*arguments, **named)
                    except (TypeError, UsageError):
                        continue
                    if made is not NotImplemented:
                        written.add((made if isinstance(made, Expression) else made._view).op)
    for function in (expressions.coalesce, expressions.concat, expressions.cross, expressions.pack):
        written.add(function(anything, anything).op)
    written.add(expressions.if_else(anything, anything, anything).op)
    written.add(expressions.sequence(a=anything).op)
    assert written - {"constant"} == set(REGISTRY) - {"events"}


OPERATOR_METHODS = {
    f"__{name}__"
    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod",
                 "rmod", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "and", "rand", "or", "ror", "invert")
}  # fmt: skip


def test_an_operator_is_registered_once_and_in_a_family() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register("add", family="arithmetic", spelling="a", rule=gives(INT))(lambda: None)
    with pytest.raises(ValueError, match="no family"):
        register("new", family="magic", spelling="a", rule=gives(INT))
    assert "new" not in REGISTRY


def test_a_call_has_the_inputs_and_parameters_of_its_kernel() -> None:
    REGISTRY["add"].check_call(2, {})
    REGISTRY["coalesce"].check_call(5, {})
    REGISTRY["within"].check_call(1, {"duration_ms": 1})
    for name, count, params in (
        ("add", 3, {}),
        ("add", 1, {}),
        ("add", 2, {"x": 1}),
        ("within", 2, {"duration_ms": 1}),
        ("within", 1, {}),
        ("count", 0, {}),
    ):
        with pytest.raises(TypeClash):
            REGISTRY[name].check_call(count, params)


def test_rules_are_made_of_kinds() -> None:
    refused: list[str] = []
    rule = gives(FLOAT, ("int", "float"), ("string",), check=lambda params: refused.append(str(params)))
    assert rule((INT, STRING), {}) == FLOAT
    assert rule((INT.with_nullable(True), STRING), {}) == FLOAT.with_nullable(True)
    assert refused == ["{}", "{}"]
    with pytest.raises(TypeClash) as clash:
        rule((INT, BOOL), {})
    assert clash.value.got == "it is given bool" and clash.value.allowed == "it takes: string"
    assert need((INT,), 0, ("int",)) is INT
    assert any_missing((INT, BOOL.with_nullable(True))) and not any_missing((INT,))
