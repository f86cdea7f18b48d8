"""This module defines the entities that expressions read: user, item, request, context, and the events of the user.

Each entity declares its columns and their types. An expression can read only declared and built-in columns, so a typo
is found before data is read. An attribute may be missing (for an unknown id or an empty cell), unless it has a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from tackboard.core.errors import UsageError
from tackboard.features.expressions import Duration, Expression, caller_place, duration_ms
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

BUILT_IN: dict[str, dict[str, FeatureType]] = {
    "user": {"id": ID},
    "item": {"id": ID},
    "request": {"time": TIME},
    "context": {},
    "event": {"item": ID, "action": STRING, "surface": STRING, "time": TIME},
}
"""The columns that each entity has without a declaration. Their values are never missing."""
FUTURE = ("num_events", "first_ms", "last_ms")
"""Columns of items.parquet and users.parquet that are computed over the whole log, which includes the future."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """The declaration of a column. If a value lies outside [minimum, maximum], reading the data raises an error."""

    type: FeatureType
    minimum: float | None = None
    maximum: float | None = None
    default: Any = None

    def to_params(self, entity: str, column: str) -> dict[str, Any]:
        """Returns the parameters of the `source` operator that reads this column."""
        type_ = self.type.with_nullable(self.default is None)
        params: dict[str, Any] = {"entity": entity, "column": column, "type": type_.to_json()}
        for name in ("minimum", "maximum", "default"):
            if getattr(self, name) is not None:
                params[name] = getattr(self, name)
        return params


def Bool(*, default: bool | None = None) -> Declared:
    """Declares a column of bools."""
    return Declared(type=BOOL, default=default)


def Int(*, minimum: int | None = None, maximum: int | None = None, default: int | None = None) -> Declared:
    """Declares a column of 64-bit integers."""
    return Declared(type=INT, minimum=minimum, maximum=maximum, default=default)


def Float(*, minimum: float | None = None, maximum: float | None = None, default: float | None = None) -> Declared:
    """Declares a column of 64-bit floats."""
    return Declared(type=FLOAT, minimum=minimum, maximum=maximum, default=default)


def String(*, default: str | None = None) -> Declared:
    """Declares a column of texts."""
    return Declared(type=STRING, default=default)


def Id(*, default: int | None = None) -> Declared:
    """Declares a column of ids. A stored int64 is the id itself; a stored string is hashed to an id."""
    return Declared(type=ID, default=default)


def Time() -> Declared:
    """Declares a column of times, in ms since 1970 UTC."""
    return Declared(type=TIME)


def Vector(width: int) -> Declared:
    """Declares a column of vectors of `width` numbers."""
    return Declared(type=FeatureType("vector", width=width))


def List(element: Declared | Callable[[], Declared]) -> Declared:
    """Declares a column of lists, e.g. `List(Id)`."""
    return Declared(type=_declared(element).type.in_list())


class Entity:
    """An entity. Its columns are written as attributes (`item.price`) or with brackets (`item["price"]`)."""

    kind = ""

    def __init__(self, **columns: Declared | Callable[[], Declared]) -> None:
        self._columns = {name: _declared(declared, name) for name, declared in columns.items()}

    def __getattr__(self, column: str) -> Expression:
        if column.startswith("_"):
            raise AttributeError(column)
        return self[column]

    def __iter__(self) -> NoReturn:
        # Without this method, a loop over an entity would ask for the columns 0, 1, 2, … and never end.
        raise UsageError(
            f"{caller_place()}: columns of {'events' if self.kind == 'event' else self.kind} cannot be looped over",
            allowed="events are aggregated: events.count(), events.collect(events.item)",
        )

    def __getitem__(self, column: str) -> Expression:
        if column in self._columns:
            return Expression("source", (), self._columns[column].to_params(self.kind, column))
        if column in BUILT_IN[self.kind]:
            type_ = BUILT_IN[self.kind][column]
            return Expression("source", (), {"entity": self.kind, "column": column, "type": type_.to_json()})
        known = [*BUILT_IN[self.kind], *self._columns]
        return Expression("unknown_column", (), {"entity": self.kind, "column": column, "known": known})


class User(Entity):
    """The user of the request. Has `user.id` and declared attributes, with their values at the request's time."""

    kind = "user"


class Item(Entity):
    """The candidate. Has `item.id` and declared attributes, with their values at the request's time."""

    kind = "item"


class Request(Entity):
    """The request. Its only column is `request.time`."""

    kind = "request"

    def __init__(self) -> None:
        super().__init__()


class Context(Entity):
    """Declared values that the caller sends with the request, such as a device or a query."""

    kind = "context"


def _aggregate(op: str, about: str) -> Callable[[Events, Any], Expression]:
    """Returns a method that aggregates a column of the chosen events."""

    def aggregate(self: Events, column: Any) -> Expression:
        return Expression(op, (self._view, column))

    aggregate.__doc__ = about
    return aggregate


class Events(Entity):
    """The events of the user that were received strictly before the request.

    `events.action` is a column of the events. Methods such as `where` and `within` choose some of the events and return
    an `Events` object with the same columns and operators. A feature must aggregate the events (`count`, `sum`, …),
    because a column of the events is not a value of the request.
    """

    kind = "event"

    def __init__(self, **columns: Declared | Callable[[], Declared]) -> None:
        super().__init__(**columns)
        self._view = Expression("events")

    def _chosen(self, view: Expression) -> Events:
        chosen = Events(**self._columns)
        chosen._view = view
        return chosen

    def where(self, condition: Expression) -> Events:
        """Chooses the events that meet a condition on columns of the events."""
        return self._chosen(Expression("where", (self._view, condition)))

    def within(self, duration: Duration) -> Events:
        """Chooses the events that are younger than `duration` at the time of the request."""
        (whole_ms,) = duration_ms("within({})", duration)
        return self._chosen(Expression("within", (self._view,), {"duration_ms": whole_ms}))

    def between(self, oldest: Duration, newest: Duration) -> Events:
        """Chooses the events whose age at the time of the request is below `oldest` and at least `newest`."""
        oldest_ms, newest_ms = duration_ms("between({}, {})", oldest, newest)
        return self._chosen(Expression("between", (self._view,), {"oldest_ms": oldest_ms, "newest_ms": newest_ms}))

    def newest(self, count: int) -> Events:
        """Chooses the newest `count` events."""
        return self._chosen(Expression("newest", (self._view,), {"count": count}))

    def anchored(self, count: int, stride: int) -> Events:
        """Chooses the newest `count` events, without the events before an anchor (one of the oldest `stride`)."""
        return self._chosen(Expression("anchored", (self._view,), {"count": count, "stride": stride}))

    def matching(self, column: Expression, value: Any) -> Events:
        """Chooses the events whose `column` equals `value`, which is a value of the request or of the candidate."""
        return self._chosen(Expression("matching", (self._view, column, value)))

    def count(self) -> Expression:
        """Returns the number of events."""
        return Expression("count", (self._view,))

    last = _aggregate("last", "The value of the column in the last event.")
    distinct = _aggregate("count_distinct", "The number of distinct values in the column.")
    sum = _aggregate("sum", "The sum of the column.")
    mean = _aggregate("mean", "The mean of the column.")
    max = _aggregate("max", "The largest value of the column.")
    min = _aggregate("min", "The smallest value of the column.")
    collect = _aggregate("collect", "The values of the column in all the events, oldest first.")

    def decayed_sum(self, column: Any, *, half_life: Duration) -> Expression:
        """Returns the weighted sum of the column. An event's weight halves with every `half_life` of its age."""
        (whole_ms,) = duration_ms("decayed_sum(half_life={})", half_life)
        return Expression("decayed_sum", (self._view, column), {"half_life_ms": whole_ms})

    def top(self, column: Expression, count: int) -> Expression:
        """Returns the `count` most frequent values of the column."""
        return Expression("top", (self._view, column), {"count": count})


def _declared(column: Declared | Callable[[], Declared], name: str = "element") -> Declared:
    found = column() if callable(column) else column
    if not isinstance(found, Declared):
        raise UsageError(f"{caller_place()}: {name}={column!r:.40} declares no type", allowed=f"e.g. {name}=Float()")
    return found
