"""The registry: every operator is documented, reachable from the language, and does what its examples say."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.features import expressions
from tackboard.features.batch_executor import BatchExecutor, Rows
from tackboard.features.column import Column, differing_rows
from tackboard.features.entities import Declared, Events, Item, Request
from tackboard.features.expressions import Expression
from tackboard.features.feature_set import FeatureSet
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.operators import (
    FAMILIES,
    REGISTRY,
    Example,
    TypeClash,
    any_missing,
    gives,
    need,
    register,
)
from tackboard.features.tables import EntityTable, EventTable
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

WORDS = ("coalesce", "concat", "cross", "days", "hours", "minutes", "if_else", "pack", "sequence")
DAY = expressions.days(1)
FUNCTIONS = {name: getattr(expressions, name) for name in WORDS}
EXAMPLES = [
    pytest.param(example, id=f"{name}-{number}")
    for name, operator in REGISTRY.items()
    for number, example in enumerate(operator.examples)
]
EVENT_TYPES = {"item": ID, "action": STRING, "surface": STRING, "time": TIME}


def spelt_type(text: str) -> FeatureType:
    """The type that str(FeatureType) spells so."""
    found = re.fullmatch(r"(\w+)(?:\[(\w+)\])?(\?)?", text)
    assert found is not None, text
    kind, inner, nullable = found.group(1), found.group(2) or "", found.group(3) is not None
    if kind == "vector":
        return FeatureType(kind, width=int(inner), nullable=nullable)
    return FeatureType(kind, element=inner, nullable=nullable)


def declared(type_: FeatureType) -> Declared:
    """A column of that type; one that is never missing is declared with a default, where there can be one."""
    defaults: dict[str, Any] = {"bool": False, "int": 0, "float": 0.0, "string": "", "id": 0}
    return Declared(type=type_.with_nullable(False), default=None if type_.nullable else defaults.get(type_.kind))


def run_example(example: Example) -> list[Any]:
    """An example through language, compiler and both executors."""
    inputs = {name: value for name, value in example.inputs.items() if name not in ("events", "request_ms")}
    types = {name: spelt_type(text) for name, (text, _) in inputs.items()}
    item = Item(**{name: declared(type_) for name, type_ in types.items()})
    names = FUNCTIONS | {"events": Events(), "request": Request()} | {name: item[name] for name in inputs}
    plan = FeatureSet("example", value=eval(example.code, {}, names)).plan  # noqa: S307
    columns = {name: Column.of(types[name], values) for name, (_, values) in inputs.items()}
    ids = np.arange(max((len(column) for column in columns.values()), default=0), dtype=np.int64)
    moment = int(example.inputs.get("request_ms", 0))
    events = {
        name: Column.of(EVENT_TYPES[name], values) for name, values in example.inputs.get("events", {}).items()
    } or {"time": Column.of(TIME, [])}
    times = events["time"].values
    batch = BatchExecutor(
        plan,
        events=EventTable(
            user_ids=np.array([7]), offsets=np.array([0, len(times)]), times=times, received=times, columns=events
        ),
        items=EntityTable(ids, columns),
    ).compute(
        Rows(
            user_ids=np.array([7]),
            request_ms=np.array([moment]),
            item_ids=ids,
            request_of=np.zeros(len(ids), dtype=np.int64),
        )
    )["value"]
    seen = np.flatnonzero(times < moment)
    online = OnlineExecutor(plan).compute(
        history={name: column.take(seen) for name, column in events.items()},
        request_ms=moment,
        user_id=7,
        item_ids=ids,
        item=columns,
    )["value"]
    assert len(differing_rows(batch, online)) == 0
    return batch.to_pylist()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | dict) and type(one) is type(other) and len(one) == len(other):
        places = one if isinstance(one, dict) else range(len(one))
        return all(same(one[place], other[place]) for place in places)
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_gives_its_result(example: Example) -> None:
    got = run_example(example)
    assert same(got, example.result), got


@pytest.mark.parametrize("name", REGISTRY)
def test_every_operator_is_documented(name: str) -> None:
    operator = REGISTRY[name]
    assert operator.name == name and operator.family in FAMILIES and operator.spelling
    assert operator.summary.endswith(".") and operator.examples
    assert name == "events" or operator.kernel.__doc__


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


@pytest.mark.parametrize("name", ["coalesce", "cross", "concat", "pack", "sequence"])
def test_an_operator_of_any_number_of_inputs_needs_some(name: str) -> None:
    with pytest.raises(TypeClash):
        REGISTRY[name].rule((), {"names": [], "separator": ""})


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
