"""Random data and random features for the parity tests: everything that a seed decides.

The data is nasty on purpose: few distinct ids, so that they meet; int64 extremes; events that arrive late, out of order
and at equal times; users without events; items nobody has seen; attributes with several versions; every special float.
The features are grown: an operator of the registry is offered random inputs and random parameters, and what the
compiler accepts becomes an input for the next. So the compiler is asked about nonsense all the time, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from feature_reference import Asked, Event, Facts

from tackboard.features.arrow import to_arrow
from tackboard.features.batch_executor import RequestRows
from tackboard.features.column import Column
from tackboard.features.entities import BUILT_IN, Entity
from tackboard.features.entity_tables import EVENT_COLUMNS, EntityTable, EventTable
from tackboard.features.expressions import NOWHERE, Expression
from tackboard.features.language import (
    Bool,
    Context,
    Events,
    FeatureSet,
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
from tackboard.features.operators import ABOUT_EVENTS, REGISTRY, TypeClash
from tackboard.features.plan import EVENT, Plan, PlanBuilder
from tackboard.features.types import FeatureType

MIN, MAX = -(2**63), 2**63 - 1
DAY = 86_400_000
SPRING, AUTUMN = 1_711_846_800_000, 1_729_990_800_000
"""Summer time begins and ends in Berlin, 2024."""
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Casablanca")
STRINGS = (
    *("", "a", "A", "click", "save", "hide", "\u00e9", "e\u0301", "\u0130", "\u03a3\u03a3", " x\u00a0", "\U0001f642"),
    *("stra\u00dfe", "\ufb01"),
)
INTS = (0, 1, -1, 2, 3, 7, 100, 2**31, 2**53 + 1, MIN, MIN + 1, MAX, MAX - 1)
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0)
FLOATS = (*SPECIAL, -1.5, 0.1, 5e-324, 1e308, -1e308, 2.0**53, 2.0**63, 1e-9)
FLOATS32 = (*SPECIAL, -2.5, 0.10000000149011612, 1.401298464324817e-45, 3.4028234663852886e38)
IDS = (0, 1, 2, 3, 4, 5, -1, MIN, MAX)
USERS = (1, 2, 3, 4, 5, 0, -7, MIN, MAX)
TIMES = (
    *(SPRING - 1, SPRING, AUTUMN - 1, AUTUMN, 0, -1, SPRING + DAY, AUTUMN - 3600_000, MIN, MAX, MAX - 1),
    *(253_402_300_800_000, -62_135_596_800_001),
)

ENTITIES: dict[str, Entity] = {
    "item": Item(
        price=Float, stock=Int, flag=Bool, category=String, maker=Id, born=Time, look=Vector(3), tags=List(Id),
        words=List(String), marks=List(Float), sizes=List(Int), rating=Float(default=1.5), kind=String(default="none"),
        shelf=Int(default=-1), owner=Id(default=3), on=Bool(default=True),
    ),
    "user": User(
        score=Float, level=Int, member=Bool, country=String, group=Id, born=Time, taste=Vector(3), likes=List(Id),
        said=List(String), rank=Int(default=5), name=String(default="e\u0301"),
    ),
    "context": Context(
        device=String, depth=Int, ratio=Float, page=Id, since=Time, mood=Vector(3), prior=List(Id),
        dark=Bool(default=False),
    ),
    "event": Events(
        dwell_ms=Int, value=Float, query=String, seen=Bool, place=Id, until=Time,
        weight=Float(default=0.5), label=String(default="?"),
    ),
    "request": Request(),
}  # fmt: skip


class World:
    """Random facts and requests, as plain Python values (for the reference) and as tables (for the executors)."""

    def __init__(self, seed: int, *, is_large: bool = False) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.calm = pick.random() < 0.5
        """Whether times are near each other: among int64 extremes hardly any event is ever visible."""
        self.even = pick.random() < 0.3
        self.nans = pick.random() < 0.3
        """Whether most floats are NaNs of either sign: of two of them an operator may keep the one or the other."""
        self.events = {user: self._events() for user in pick.sample(USERS, pick.randint(0, 8))}
        self.users = self._versions("user", pick.sample(USERS, pick.randint(0, 7)))
        self.items = self._versions("item", pick.sample(IDS, pick.randint(0, 7)))
        self.facts = Facts(self.events, self.users, self.items)
        self.is_large = is_large
        total = 12 if is_large else pick.choice((1, 2, 3, 8, 15))
        self.requests = [self._request() for _ in range(total)]

    def _time(self) -> int:
        if self.calm:
            return (
                SPRING + self.random.choice((-1, 0, 1, DAY)) + self.random.randint(-6, 6) * self.random.choice((1, DAY))
            )
        return self.random.choice(TIMES)

    def _value(self, type_: FeatureType) -> Any:
        pick = self.random
        if type_.kind == "bool":
            return pick.random() < 0.5
        if type_.kind == "int":
            return pick.choice(INTS) if pick.random() < 0.4 else pick.randint(-5, 5)
        if type_.kind == "float":
            if self.nans and pick.random() < 0.7:
                return pick.choice((math.nan, -math.nan))
            return pick.choice(FLOATS) if pick.random() < 0.5 else pick.gauss(0.0, 3.0)
        if type_.kind == "string":
            return pick.choice(STRINGS)
        if type_.kind == "id":
            return pick.choice(IDS)
        if type_.kind == "time":
            return self._time()
        if type_.kind == "vector":
            special = pick.random() < 0.3
            if self.nans and pick.random() < 0.7:
                return [pick.choice((math.nan, -math.nan)) for _ in range(type_.width)]
            numbers = [pick.choice(FLOATS32) if special else pick.gauss(0.0, 1.0) for _ in range(type_.width)]
            return [float(np.float32(number)) for number in numbers]
        return [self._value(type_.of_elements()) for _ in range(pick.choice((0, 0, 1, 2, 5)))]

    def _columns(self, entity: str) -> dict[str, Any]:
        absent = self.random.choice((0.0, 0.3, 1.0))
        return {
            name: None if self.random.random() < absent else self._value(declared.type)
            for name, declared in ENTITIES[entity]._columns.items()
        }

    def _events(self) -> list[Event]:
        found = []
        for _ in range(self.random.choice((1, 2, 5, 12))):
            time = self._time()
            late = self.random.choice((0, 0, 0, 1, DAY, -DAY, -1))
            built_in = {name: self._value(type_) for name, type_ in BUILT_IN["event"].items() if name != "time"}
            received = min(max(time + late, MIN), MAX)
            found.append(Event(time, received, self._columns("event") | built_in))
        return sorted(found, key=lambda event: event.time)

    def _versions(self, entity: str, ids: Sequence[int]) -> dict[int, list[tuple[int, Mapping[str, Any]]]]:
        versions = {}
        changing = self.random.random() < 0.6
        for id_ in ids:
            times = {self._time() for _ in range(self.random.randint(1, 3))} if changing else {MIN}
            versions[id_] = [(time, self._columns(entity)) for time in sorted(times)]
        return versions

    def _request(self) -> Asked:
        # About one candidate per request, so that rows of requests and of candidates are now and then as many.
        counts = (20, 50, 60) if self.is_large else (0, 1, 1, 2) if self.even else (0, 1, 10)
        count = self.random.choice(counts)
        ids = [self.random.choice(IDS) for _ in range(count)]
        return Asked(self.random.choice(USERS), self._time(), self._columns("context"), ids)

    # The same as tables.

    def event_table(self, plan: Plan) -> EventTable:
        """The events as a dataset holds them, through Arrow."""
        users = sorted(self.events)
        found = [event for user in users for event in self.events[user]]
        columns = {EVENT_COLUMNS.get(name, name): column for name, column in self.event_columns(found).items()}
        table = {name: to_arrow(column) for name, column in columns.items()}
        table["user_id"] = pa.array([user for user in users for _ in self.events[user]], pa.int64())
        table["time_ms"] = pa.array([event.time for event in found], pa.int64())
        table["received_ms"] = pa.array([event.received for event in found], pa.int64())
        return EventTable.from_arrow(pa.table(table), plan)

    def event_columns(self, events: Sequence[Event]) -> dict[str, Column]:
        """Columns of some events, `time` among them."""
        columns = {"time": Column.of(FeatureType("time"), [event.time for event in events])}
        for name, type_ in column_types("event").items():
            if name != "time":
                columns[name] = Column.of(type_, [event.columns[name] for event in events])
        return columns

    def entity_table(self, entity: str, plan: Plan) -> EntityTable:
        """The attributes as a dataset holds them, through Arrow."""
        versions = self.users if entity == "user" else self.items
        rows = [(id_, start, columns) for id_ in sorted(versions) for start, columns in versions[id_]]
        table = {
            name: to_arrow(Column.of(type_, [row[2][name] for row in rows]))
            for name, type_ in column_types(entity).items()
            if name != "id"
        }
        table[f"{entity}_id"] = pa.array([row[0] for row in rows], pa.int64())
        if any(len(kept) > 1 or kept[0][0] != MIN for kept in versions.values()):
            table["valid_from_ms"] = pa.array([row[1] for row in rows], pa.int64())
        return EntityTable.from_arrow(pa.table(table), entity, plan)

    def rows(self) -> RequestRows:
        counts = [len(asked.item_ids) for asked in self.requests]
        return RequestRows(
            user_ids=np.array([asked.user_id for asked in self.requests], dtype=np.int64),
            request_ms=np.array([asked.time for asked in self.requests], dtype=np.int64),
            item_ids=np.array([id_ for asked in self.requests for id_ in asked.item_ids], dtype=np.int64),
            request_of=np.repeat(np.arange(len(counts)), counts),
            context=self.context_columns(self.requests),
        )

    def context_columns(self, requests: Sequence[Asked]) -> dict[str, Column]:
        return {
            name: Column.of(type_, [asked.context[name] for asked in requests])
            for name, type_ in column_types("context").items()
        }

    def attributes(self, entity: str, ids: Sequence[int], time: int) -> dict[str, Column]:
        """Attributes of some ids as a caller would bring them, as valid at a time."""
        versions = self.users if entity == "user" else self.items
        valid = [[columns for start, columns in versions.get(id_, ()) if start <= time] for id_ in ids]
        return {
            name: Column.of(type_, [found[-1][name] if found else None for found in valid])
            for name, type_ in column_types(entity).items()
            if name != "id"
        }

    def history(self, asked: Asked) -> dict[str, Column]:
        """What the caller of an online request knows: the events received strictly before it."""
        return self.event_columns([e for e in self.events.get(asked.user_id, ()) if e.received < asked.time])


def column_types(entity: str) -> dict[str, FeatureType]:
    declared = {name: column.type for name, column in ENTITIES[entity]._columns.items()}
    return BUILT_IN[entity] | declared


class Grower:
    """Grows random expressions that the compiler accepts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.builder = PlanBuilder()
        self.pool: list[tuple[Expression, int]] = []
        self.refused = 0
        for entity in ENTITIES:
            for name in column_types(entity):
                self._offer(ENTITIES[entity][name])
        for value in (0, 1, -3, MAX, 0.5, -0.0, math.nan, math.inf, "click", "e\u0301", "", True, False):
            self._offer(Expression("constant", (), {"value": value}))
        self._offer(Expression("events"))
        for column, value in (("item", ENTITIES["item"]["id"]), ("action", ENTITIES["item"]["category"])):
            args = (Expression("events"), ENTITIES["event"][column], value)
            self._offer(Expression("matching", args), [self._index(argument) for argument in args])

    def _index(self, expression: Expression) -> int:
        return self.builder.add(expression.op, (), expression.params, NOWHERE)

    def _offer(self, expression: Expression, args: Sequence[int] = ()) -> bool:
        try:
            index = self.builder.add(expression.op, tuple(args), expression.params, NOWHERE)
        except TypeClash:
            self.refused += 1
            return False
        if index == len(self.builder.nodes) - 1:
            self.pool.append((expression, index))
        return True

    def grow(self, op: str, tries: int = 60) -> bool:
        """Offers an operator random inputs until the compiler accepts one."""
        for _ in range(tries):
            chosen = self._inputs(op)
            args = [expression for expression, _ in chosen]
            if self._offer(Expression(op, args, self.params(op, len(chosen))), [index for _, index in chosen]):
                return True
        return False

    def _inputs(self, op: str) -> list[tuple[Expression, int]]:
        """Random inputs; the first is often of a kind that the operator has a chance with."""
        few, many = ARITY.get(op, (1, 1))
        count = self.random.randint(few, many)
        is_about_events = REGISTRY[op].family in ABOUT_EVENTS and op != "sequence"
        chosen = [self.random.choice(self.pool) for _ in range(count)]
        wanted = "view" if is_about_events else "list" if op in OF_LISTS else "vector" if op in OF_VECTORS else ""
        if wanted and self.random.random() < 0.8:
            chosen[0] = self._of_kind(wanted)
        if is_about_events and count > 1 and self.random.random() < 0.8:
            chosen[1] = self.random.choice([pair for pair in self.pool if self.builder.nodes[pair[1]].level == EVENT])
        for place in range(1, count):
            # Of two values, mostly two that have a kind in common.
            if not is_about_events and self.random.random() < 0.7:
                chosen[place] = self._of_kind(self.builder.nodes[chosen[0][1]].type.kind)
        if op == "matching" and self.random.random() < 0.8:
            chosen[2] = self._of_kind(self.builder.nodes[chosen[1][1]].type.kind)
        if op == "if_else" and self.random.random() < 0.8:
            chosen[0] = self._of_kind("bool")
        return chosen

    def _of_kind(self, kind: str) -> tuple[Expression, int]:
        fitting = [pair for pair in self.pool if self.builder.nodes[pair[1]].type.kind == kind] or self.pool
        # Half of the time one that was grown lately, so that features get deep.
        return self.random.choice(fitting[-5:] if self.random.random() < 0.5 else fitting)

    def params(self, op: str, count: int) -> dict[str, Any]:
        """Random parameters of an operator; some cannot be."""
        if op == "sequence":
            return {"names": [f"c{place}" for place in range(count)]}
        return {name: make(self.random) for name, make in PARAMS.get(op, {}).items()}

    def feature_set(self) -> FeatureSet:
        """All grown values as one set; views and columns of the events, which are no features, are left out."""
        features = {}
        for place, (expression, index) in enumerate(self.pool):
            node = self.builder.nodes[index]
            if node.type.kind != "view" and node.level != EVENT:
                features[f"{expression.op}_{place}"] = expression
        return FeatureSet("grown", **features)


def _one_of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda pick: pick.choice(values)


OF_LISTS = [name for name, operator in REGISTRY.items() if operator.family == "lists"] + ["sequence"]
OF_VECTORS = ("dot", "norm", "l2_normalise", "cosine")
BINARY = (
    "add", "subtract", "multiply", "divide", "floor_divide", "modulo", "equal", "not_equal", "less", "less_equal",
    "greater", "greater_equal", "and", "or", "dot", "cosine", "seconds_since", "has", "overlap", "where", "last",
    "count_distinct", "sum", "mean", "max", "min", "decayed_sum", "top", "collect",
)  # fmt: skip
ARITY = dict.fromkeys(BINARY, (2, 2)) | {
    "if_else": (3, 3), "matching": (3, 3), "coalesce": (1, 4), "cross": (1, 3), "concat": (1, 3), "pack": (1, 4),
    "sequence": (1, 3), "events": (0, 0),
}  # fmt: skip
DURATION = _one_of(1, 2, 3, 3600_000, DAY, 2 * DAY, 40 * DAY, 200 * 366 * DAY, -1, 0, 1.5, 200 * 366 * DAY + 1)
CONSTANT = _one_of(0, 1, -1, 0.0, -0.0, 1.5, MAX, MIN, 2**63, "", "a", "click", True, None, [], [1], math.nan)
PARAMS: dict[str, dict[str, Callable[[random.Random], Any]]] = {
    "fill_missing": {"value": CONSTANT},
    "missing_if": {"value": CONSTANT},
    "is_in": {"values": _one_of([], [0, 1, MAX], [MIN, 3], ["a", "e\u0301"], ["click"], [1.5], [None], 3)},
    "bucket_hash": {"num_buckets": _one_of(1, 7, 2**31 - 1, 0, 2**31), "seed": _one_of(0, 1, 2**32 - 1, -1)},
    "index_in": {"names": _one_of(["click", "save"], ["e\u0301", "\u00e9", ""], [], ["a", "a"], [1])},
    "clip": {"low": _one_of(None, 0, -1, 0.0, -0.5, MIN), "high": _one_of(None, 0, 1, 0.0, 2.5, MAX)},
    "normalise": {"mean": _one_of(0, 1.5, MAX, -0.0), "std": _one_of(1, 2.5, 1e-300, 0, -1)},
    "bucketize": {
        "boundaries": _one_of(
            [0], [0, 1, 2], [-1.5, 0.0, 2], [MIN, MAX], [0.5], [], [1, 1], [math.nan], [2**53, 2**53 + 1]
        )
    },
    "concat": {"separator": _one_of("", "/", "\u0301", 3)},
    "contains_text": {"text": _one_of("a", "e\u0301", "\u0301", "li", "", 3)},
    "hour": {"zone": _one_of(*ZONES, "Europe/Berlni", 3)},
    "weekday": {"zone": _one_of(*ZONES, "", None)},
    "minute_of_day": {"zone": _one_of(*ZONES, "../zones")},
    "at": {"index": _one_of(0, 1, 2, -1, -3, 100, 2**31, True)},
    "take": {"count": _one_of(0, 1, 3, 10**6, -1, 1.0)},
    "within": {"duration_ms": DURATION},
    "between": {"oldest_ms": DURATION, "newest_ms": DURATION},
    "newest": {"count": _one_of(1, 2, 3, 10**6, 0, -1, True)},
    "anchored": {"count": _one_of(1, 2, 3, 10**6, 0), "stride": _one_of(1, 2, 3, 10**6, 0, -1, True)},
    "decayed_sum": {"half_life_ms": DURATION},
    "top": {"count": _one_of(1, 2, 10_000, 0, 10_001)},
}
