"""A slow twin of both executors: a plan interpreted row by row in plain Python, sharing no code with kernels and views.

A missing value is None; bool, int, float and str are themselves; ids and times are ints; a vector is a list of floats,
each of 32 bits. Of NumPy it takes what Python does not have, on one value at a time: log, log1p, exp, and rounding to
32 bits. NaNs are NaNs: Python does not say which of their bits it keeps.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.resources
import itertools
import math
import struct
import unicodedata
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from tackboard.core import keyed_random
from tackboard.features.plan import CANDIDATE, EVENT, Node, Plan

Values = Mapping[str, Any]
MASK = (1 << 64) - 1
CYCLE_S = 146_097 * 86_400
"""400 years."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One event: when it happened, when it was received, and its columns."""

    time: int
    received: int
    columns: Values


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: who, when, with what context, for which items."""

    user_id: int
    time: int
    context: Values
    item_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that is known. Versions of attributes are (valid from, columns), oldest first."""

    events: Mapping[int, Sequence[Event]]
    users: Mapping[int, Sequence[tuple[int, Values]]]
    items: Mapping[int, Sequence[tuple[int, Values]]]


def interpret(plan: Plan, facts: Facts, requests: Sequence[Asked]) -> dict[str, list[Any]]:
    """Every feature: a value per request, or per candidate where the feature is of that level."""
    result: dict[str, list[Any]] = {name: [] for name in plan.features}
    for asked in requests:
        request = _Scope(plan, facts, asked, None, None)
        candidates = [_Scope(plan, facts, asked, item_id, request) for item_id in asked.item_ids]
        for name, index in plan.features.items():
            scopes = candidates if plan.nodes[index].level == CANDIDATE else [request]
            result[name] += [scope.value(index) for scope in scopes]
    return result


class _Scope:
    """The values of one request (`item_id` None) or one candidate. An event's values are computed in the request's."""

    def __init__(self, plan: Plan, facts: Facts, asked: Asked, item_id: int | None, request: _Scope | None) -> None:
        self.plan, self.facts, self.asked, self.item_id, self.request = plan, facts, asked, item_id, request
        self.known: dict[Any, Any] = {}

    def value(self, index: int, event: Event | None = None) -> Any:
        node = self.plan.nodes[index]
        if self.request is not None and node.level != CANDIDATE:
            return self.request.value(index, event)
        key = (index, id(event)) if node.level == EVENT else index
        if key not in self.known:
            self.known[key] = self._compute(node, event)
        return self.known[key]

    def _compute(self, node: Node, event: Event | None) -> Any:
        if node.op == "source":
            return self._source(node, event)
        if node.op == "constant":
            return node.params["value"]
        if node.op in EVENT_OPERATORS:
            return EVENT_OPERATORS[node.op](self, node)
        operator = OPERATORS[node.op]
        args = [self.value(argument, event) for argument in node.args]
        if node.op == "fill_missing" and node.type.kind == "vector" and args[0] is None:
            return [round32(node.params["value"])] * node.type.width
        kinds = [self.plan.nodes[argument].type for argument in node.args]
        if node.maps_lists:
            length = next(len(value) for value, kind in zip(args, kinds, strict=True) if kind.kind == "list")
            rows = [
                [value[place] if kind.kind == "list" else value for value, kind in zip(args, kinds, strict=True)]
                for place in range(length)
            ]
            return [_whole(operator, row, node, node.type.element) for row in rows]
        return _whole(operator, args, node, node.type.kind)

    def _source(self, node: Node, event: Event | None) -> Any:
        entity, column = node.params["entity"], node.params["column"]
        if entity == "event":
            assert event is not None
            found = event.time if column == "time" else event.columns.get(column)
        elif entity == "request":
            found = self.asked.time
        elif entity == "context":
            found = self.asked.context.get(column)
        elif column == "id":
            found = self.asked.user_id if entity == "user" else self.item_id
        else:
            table, key = (
                (self.facts.users, self.asked.user_id) if entity == "user" else (self.facts.items, self.item_id)
            )
            valid = [columns for start, columns in table.get(key, ()) if start <= self.asked.time]
            found = valid[-1].get(column) if valid else None
        return node.params.get("default") if found is None else found

    def events(self, index: int) -> list[Event]:
        """The events of a view."""
        return self.value(index)

    def column(self, node: Node) -> list[Any]:
        """The column of an aggregation, one value per event of its view."""
        return [self.value(node.args[1], event) for event in self.events(node.args[0])]

    def present(self, node: Node) -> list[tuple[Event, Any]]:
        """(event, value) of an aggregation's column, where it is not missing."""
        pairs = zip(self.events(node.args[0]), self.column(node), strict=True)
        return [(event, value) for event, value in pairs if value is not None]


SEES_MISSING = {"is_missing", "fill_missing", "coalesce", "and", "or", "if_else"}


def _whole(operator: Callable[..., Any], args: Sequence[Any], node: Node, kind: str) -> Any:
    if node.op not in SEES_MISSING and any(value is None for value in args):
        return None
    return operator(node.params, kind, *args)


def wrap(value: int) -> int:
    """An int as 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def as_kind(value: Any, kind: str) -> Any:
    """A number as the promoted type has it."""
    return float(value) if kind == "float" else int(value) if kind == "int" else value


def round32(value: float | int) -> float:
    """A number rounded to a 32-bit float."""
    with np.errstate(all="ignore"):
        return float(
            np.array([value], dtype=np.float64 if isinstance(value, float) else np.int64).astype(np.float32)[0]
        )


def numpy_of(function: Any, value: Any) -> float:
    """A function of NumPy on one value."""
    with np.errstate(all="ignore"):
        return float(function(np.array([float(value)]))[0])


def quotient(a: float, b: float) -> float:
    """a / b by IEEE 754."""
    if b != 0.0 or math.isnan(b):
        return a / b
    if a == 0.0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, math.copysign(1.0, a) * math.copysign(1.0, b))


def in_order(values: Sequence[float]) -> float:
    """A sum, one after the other."""
    total = 0.0
    for value in values:
        total += value
    return total


# Values beside each other.


def _arithmetic(of_ints: Callable[[int, int], int], of_floats: Callable[[float, float], float]) -> Callable[..., Any]:
    def compute(_params: Values, kind: str, a: Any, b: Any) -> Any:
        return of_floats(float(a), float(b)) if kind == "float" else wrap(of_ints(int(a), int(b)))

    return compute


def _compare(decide: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    def compute(_params: Values, _kind: str, a: Any, b: Any) -> bool:
        if isinstance(a, float) or isinstance(b, float):
            a, b = float(a), float(b)
        return decide(a, b)

    return compute


def _division(choose: Callable[[int, int], int]) -> Callable[..., int | None]:
    return lambda _params, _kind, a, b: None if int(b) == 0 else wrap(choose(int(a), int(b)))


def _floor(_params: Values, kind: str, a: Any) -> Any:
    if kind == "int" or not math.isfinite(a):
        return a
    return math.copysign(float(math.floor(a)), a) if math.floor(a) == 0 else float(math.floor(a))


def _and(_params: Values, _kind: str, a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _or(_params: Values, _kind: str, a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


def _if_else(_params: Values, kind: str, condition: bool | None, a: Any, b: Any) -> Any:
    chosen = None if condition is None else a if condition else b
    return None if chosen is None else as_kind(chosen, kind)


def _fill(params: Values, kind: str, a: Any) -> Any:
    return as_kind(params["value"], kind) if a is None else a


def _coalesce(_params: Values, kind: str, *values: Any) -> Any:
    return next((as_kind(value, kind) for value in values if value is not None), None)


# Ids.


def hashed(value: Any) -> int:
    """The id of a value."""
    if not isinstance(value, str):
        return int(value)
    return int.from_bytes(
        hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )


def mixed(value: int, seed: int) -> int:
    """SplitMix64's finaliser over `value`, moved by the seed's own mix."""
    offset = _finalise((seed + 1) * 0x9E3779B97F4A7C15 & MASK)
    return _finalise((value + offset) & MASK)


def _finalise(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def _cross(_params: Values, _kind: str, *values: Any) -> int:
    result = mixed(hashed(values[0]) & MASK, 0)
    for value in values[1:]:
        result = mixed(result ^ (hashed(value) & MASK), 0)
    return wrap(result)


def _bucket(params: Values, _kind: str, a: int) -> int:
    return (mixed(a & MASK, (params.get("seed", 0) << 16) + 1) >> 32) * params["num_buckets"] >> 32


def _index_in(params: Values, _kind: str, a: str) -> int:
    return list(params["names"]).index(a) + 1 if a in params["names"] else 0


# Scaling.


def _clip(params: Values, kind: str, a: Any) -> Any:
    value, low, high = as_kind(a, kind), params.get("low"), params.get("high")
    if low is not None and value < as_kind(low, kind):
        value = as_kind(low, kind)
    if high is not None and value > as_kind(high, kind):
        value = as_kind(high, kind)
    return value


def _bucketize(params: Values, _kind: str, a: Any) -> int:
    boundaries = params["boundaries"]
    if isinstance(a, float) or any(isinstance(boundary, float) for boundary in boundaries):
        a, boundaries = float(a), [float(boundary) for boundary in boundaries]
    return len(boundaries) if a != a else sum(boundary <= a for boundary in boundaries)


# Vectors.


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return in_order([x * y for x, y in zip(a, b, strict=True)])


def _root(value: float) -> float:
    return math.nan if math.isnan(value) else math.sqrt(value)


def _l2(_params: Values, _kind: str, a: Sequence[float]) -> list[float]:
    length = _root(_dot(a, a))
    return [round32(quotient(x, 1.0 if length == 0.0 else length)) for x in a]


def _cosine(_params: Values, _kind: str, a: Sequence[float], b: Sequence[float]) -> float:
    left, right = _dot(a, a), _dot(b, b)
    return 0.0 if left == 0.0 or right == 0.0 else quotient(_dot(a, b), _root(left * right))


# Time.


@cache
def _zone(name: str) -> zoneinfo.ZoneInfo:
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return zoneinfo.ZoneInfo.from_file(file, key=name)


def clock(params: Values, time_ms: int) -> int:
    """Seconds since 1970 on the clock of a zone; outside Python's years by its first offset or 400-year cycle."""
    seconds, zone = time_ms // 1000, _zone(params["zone"])
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    near = max(seconds, -62_000_000_000)
    if near > 200_000_000_000:
        near = 200_000_000_000 - CYCLE_S + (near - 200_000_000_000) % CYCLE_S
    offset = (epoch + datetime.timedelta(seconds=near)).astimezone(zone).utcoffset()
    assert offset is not None
    return seconds + int(offset.total_seconds())


# Lists.


def same_key(value: Any) -> Any:
    """What two elements of a list share where they count as the same."""
    return "NaN" if value != value else (type(value), value + 0.0) if isinstance(value, float) else (type(value), value)


def distinct(values: Sequence[Any]) -> list[Any]:
    """Values without repetitions, in order of first appearance."""
    found: dict[Any, Any] = {}
    for value in values:
        found.setdefault(same_key(value), value)
    return list(found.values())


def _at(params: Values, _kind: str, a: Sequence[Any]) -> Any:
    return a[params["index"]] if -len(a) <= params["index"] < len(a) else None


def _overlap(_params: Values, _kind: str, a: Sequence[Any], b: Sequence[Any]) -> int:
    return len({same_key(value) for value in a} & {same_key(value) for value in b})


def _list_sum(_params: Values, kind: str, a: Sequence[Any]) -> Any:
    return in_order(a) if kind == "float" else wrap(sum(a))


def extreme(values: Sequence[Any], choose: Callable[..., Any]) -> Any:
    """The largest or smallest; None of none, NaN where one is NaN, 0.0 for -0.0."""
    if not values:
        return None
    if any(value != value for value in values):
        return math.nan
    found = choose(values)
    return found + 0.0 if isinstance(found, float) else found


def _differences(_params: Values, _kind: str, a: Sequence[Any]) -> list[Any]:
    floats = any(isinstance(value, float) for value in a)
    later = [y - x if floats else wrap(y - x) for x, y in itertools.pairwise(a)]
    return [0.0 if floats else 0, *later] if a else []


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": _arithmetic(lambda a, b: a + b, lambda a, b: a + b),
    "subtract": _arithmetic(lambda a, b: a - b, lambda a, b: a - b),
    "multiply": _arithmetic(lambda a, b: a * b, lambda a, b: a * b),
    "divide": lambda _p, _k, a, b: quotient(float(a), float(b)),
    "floor_divide": _division(lambda a, b: a // b),
    "modulo": _division(lambda a, b: a % b),
    "negate": lambda _p, kind, a: -a if kind == "float" else wrap(-int(a)),
    "absolute": lambda _p, kind, a: abs(a) if kind == "float" else wrap(abs(a)),
    "floor": _floor,
    "equal": _compare(lambda a, b: a == b),
    "not_equal": _compare(lambda a, b: a != b),
    "less": _compare(lambda a, b: a < b),
    "less_equal": _compare(lambda a, b: a <= b),
    "greater": _compare(lambda a, b: a > b),
    "greater_equal": _compare(lambda a, b: a >= b),
    "and": _and,
    "or": _or,
    "not": lambda _p, _k, a: not a,
    "is_in": lambda params, _k, a: a in params["values"],
    "if_else": _if_else,
    "is_missing": lambda _p, _k, a: a is None,
    "fill_missing": _fill,
    "coalesce": _coalesce,
    "missing_if": lambda params, kind, a: None if a == as_kind(params["value"], kind) else a,
    "finite": lambda _p, _k, a: a if math.isfinite(a) else None,
    "hash_id": lambda _p, _k, a: hashed(a),
    "cross": _cross,
    "bucket_hash": _bucket,
    "index_in": _index_in,
    "log": lambda _p, _k, a: numpy_of(np.log, a),
    "log1p": lambda _p, _k, a: numpy_of(np.log1p, a),
    "exp": lambda _p, _k, a: numpy_of(np.exp, a),
    "sqrt": lambda _p, _k, a: math.sqrt(a) if a >= 0 else math.nan,
    "clip": _clip,
    "normalise": lambda params, _k, a: quotient(float(a) - float(params["mean"]), float(params["std"])),
    "bucketize": _bucketize,
    "dot": lambda _p, _k, a, b: _dot(a, b),
    "norm": lambda _p, _k, a: _root(_dot(a, a)),
    "l2_normalise": _l2,
    "cosine": _cosine,
    "pack": lambda _p, _k, *values: [round32(value) for value in values],
    "lower": lambda _p, _k, a: a.lower(),
    "strip": lambda _p, _k, a: a.strip(),
    "nfc": lambda _p, _k, a: unicodedata.normalize("NFC", a),
    "concat": lambda params, _k, *values: params.get("separator", "").join(values),
    "contains_text": lambda params, _k, a: params["text"] in a,
    "seconds_since": lambda _p, _k, a, b: float(wrap(a - b)) / 1000.0,
    "hour": lambda params, _k, a: clock(params, a) // 3600 % 24,
    "weekday": lambda params, _k, a: (clock(params, a) // 86_400 + 3) % 7,
    "minute_of_day": lambda params, _k, a: clock(params, a) // 60 % 1440,
    "length": lambda _p, _k, a: len(a),
    "at": _at,
    "take": lambda params, _k, a: a[: params["count"]],
    "distinct_list": lambda _p, _k, a: distinct(a),
    "has": lambda _p, _k, a, b: same_key(b) in {same_key(value) for value in a},
    "overlap": _overlap,
    "list_sum": _list_sum,
    "list_mean": lambda _p, _k, a: in_order([float(value) for value in a]) / len(a) if a else None,
    "list_max": lambda _p, _k, a: extreme(a, max),
    "differences": _differences,
}


# Events.


def _events(scope: _Scope, _node: Node) -> list[Event]:
    seen = scope.facts.events.get(scope.asked.user_id, ())
    return [event for event in seen if event.received < scope.asked.time]


def _aged(scope: _Scope, node: Node, oldest: int, newest: int | None) -> list[Event]:
    ages = [(event, scope.asked.time - event.time) for event in scope.events(node.args[0])]
    return [event for event, age in ages if age < oldest and (newest is None or age >= newest)]


def _matching(scope: _Scope, node: Node) -> list[Event]:
    wanted = scope.value(node.args[2])
    pairs = zip(scope.events(node.args[0]), scope.column(node), strict=True)
    return [event for event, value in pairs if wanted is not None and value == wanted]


def _last(scope: _Scope, node: Node) -> Any:
    column = scope.column(node)
    return column[-1] if column else None


def _sum(scope: _Scope, node: Node) -> Any:
    values = [value for _, value in scope.present(node)]
    return in_order(values) if node.type.kind == "float" else wrap(sum(values))


def _mean(scope: _Scope, node: Node) -> float | None:
    values = [float(value) for _, value in scope.present(node)]
    return in_order(values) / len(values) if values else None


def _decayed(scope: _Scope, node: Node) -> float:
    rate = -math.log(2.0) / node.params["half_life_ms"]
    pairs = scope.present(node)
    return in_order(
        [numpy_of(np.exp, wrap(scope.asked.time - event.time) * rate) * float(value) for event, value in pairs]
    )


def _top(scope: _Scope, node: Node) -> list[Any]:
    values = [value for _, value in scope.present(node)]
    last = {value: place for place, value in enumerate(values)}
    ranked = sorted(last, key=lambda value: (-values.count(value), -last[value]))
    return ranked[: node.params["count"]]


def _anchored(scope: _Scope, node: Node) -> Any:
    count, stride = node.params["count"], node.params["stride"]
    newest = scope.events(node.args[0])[-count:]
    if len(newest) < count:
        return newest
    draws = [keyed_random.bits(43, event.time).item() for event in newest[:stride]]
    return newest[draws.index(min(draws)) :]


EVENT_OPERATORS: dict[str, Callable[[_Scope, Node], Any]] = {
    "events": _events,
    "where": lambda scope, node: [e for e in scope.events(node.args[0]) if scope.value(node.args[1], e)],
    "within": lambda scope, node: _aged(scope, node, node.params["duration_ms"], None),
    "between": lambda scope, node: _aged(scope, node, node.params["oldest_ms"], node.params["newest_ms"]),
    "newest": lambda scope, node: scope.events(node.args[0])[-node.params["count"] :],
    "anchored": _anchored,
    "matching": _matching,
    "count": lambda scope, node: len(scope.events(node.args[0])),
    "last": _last,
    "count_distinct": lambda scope, node: len({value for _, value in scope.present(node)}),
    "sum": _sum,
    "mean": _mean,
    "max": lambda scope, node: extreme([value for _, value in scope.present(node)], max),
    "min": lambda scope, node: extreme([value for _, value in scope.present(node)], min),
    "decayed_sum": _decayed,
    "top": _top,
    "collect": lambda scope, node: scope.column(node),
    "sequence": lambda scope, node: dict(
        zip(node.params["names"], [scope.value(argument) for argument in node.args], strict=True)
    ),
}


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits, except that all NaNs are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)
