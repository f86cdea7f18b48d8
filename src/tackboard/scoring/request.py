"""Turns the values that a caller sends into a `ScoreRequest`; the server and the command line share this parser.

A history event has an item, and may have an action, a surface, a time and further fields. Events may come in any order:
they are sorted by time, and ties keep their order. The features of a model decide what else the model reads: the time
of the request, attributes of the user and of the candidates, a context. A known field that this model does not read is
skipped and not converted. Errors name the field and never repeat an id.

Decided: for a value that a request lacks, the parser fills in the same default that the importer writes for a value
that a log lacks. So the model sees a missing value in a request as it saw a missing value in training. `num_unknown`
counts unknown names and events without a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bundle.signature import Signature
from tackboard.core.config import suggest
from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id
from tackboard.core.vocabulary import DEFAULT_ACTION, DEFAULT_SURFACE, UNKNOWN_NAME
from tackboard.features.column import DTYPES, Column
from tackboard.features.feature_set import FeatureSet
from tackboard.features.types import ID, STRING, TIME, FeatureType, type_from_json

INT64 = np.iinfo(np.int64)
HISTORY_FIELDS = ("item", "action", "surface", "time_ms")
LEFT_OUT = {"action": DEFAULT_ACTION, "surface": DEFAULT_SURFACE}
"""Names that events get if a request has no list of actions or no list of surfaces. The importer writes the same names
for a log without these columns. If a request has a list, an empty name in the list means UNKNOWN_NAME."""
PREFIXES = {"user": "user_", "item": "candidate_", "context": "context_"}
"""Prefixes of attribute names in a request, as in user_country, candidate_price, context_device."""
PRESENT_SUFFIX = "_present"
"""Suffix of the name of a tensor that says which values are present, as in candidate_price_present."""


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Holds the columns of one user's history, oldest event first, and the ids and attributes of C candidates.

    `attributes` holds, by entity, the attributes of the user and the context (one row each) and of the candidates (C
    rows). `num_unknown` counts events by field, for fields that the model reads: events without a time, and events with
    an action or surface that training never saw. For an unknown action or surface the model uses a vector that training
    did not change. Events without a time count as simultaneous.
    """

    history: Mapping[str, Column]
    candidate_items: NDArray[np.int64]
    request_ms: int | None = None
    user_id: int | None = None
    attributes: Mapping[str, Mapping[str, Column]] = dataclasses.field(default_factory=dict)
    num_unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)


class RequestReader:
    """Knows the inputs of a bundle's model, and makes a `ScoreRequest` from a caller's values."""

    def __init__(self, signature: Signature, features: FeatureSet) -> None:
        self.signature = signature
        self.features = features
        plan = features.plan
        self.needs_request_time = plan.needs_request_time
        self.needs_event_times = plan.needs_event_times
        self.history: dict[str, FeatureType] = {}
        """Columns of the history that the model reads."""
        self.attributes: dict[str, tuple[str, str, FeatureType]] = {}
        """Maps attribute names in requests to (entity, column, type), for all attributes that the model reads."""
        self.needs_user = False
        self._ranges: dict[str, tuple[Any, Any]] = {}
        for _, node in plan.sources():
            entity, column = str(node.params["entity"]), str(node.params["column"])
            field = f"history {column}" if entity == "event" else PREFIXES.get(entity, "") + column
            low, high = node.params.get("minimum"), node.params.get("maximum")
            if (low, high) != (None, None):
                self._ranges[field] = (-np.inf if low is None else low, np.inf if high is None else high)
            if entity == "event":
                self.history[column] = type_from_json(node.params["type"])
            elif entity in PREFIXES and column != "id":
                self.attributes[field] = (entity, column, type_from_json(node.params["type"]))
            elif entity == "user":
                self.needs_user = True
        self.fields = tuple(name for name in self.history if name not in ("item", "action", "surface", "time"))
        """Event fields that the model reads beyond item, action, surface and time."""
        named = {"action": frozenset(signature.actions), "surface": frozenset(signature.surfaces)}
        self._known = {name: names for name, names in named.items() if name in self.history}
        self._keep = plan.newest_events
        self.skipped = self._skipped_names()
        """Fields and attributes of the training feature set that the model does not read; a request may hold them."""

    def _skipped_names(self) -> frozenset[str]:
        prefixes = {"event": "history_"} | PREFIXES
        names = set()
        for declared in self.features.declared:
            entity, _, column = declared.partition(".")
            name = prefixes.get(entity, "") + column
            if entity in prefixes and column not in ("id", "item", "time") and name not in self.attributes:
                names.add(name)
        return frozenset(names - {f"history_{column}" for column in self.history})

    def read(
        self,
        history: Mapping[str, Sequence[Any]],
        candidates: Sequence[Any],
        *,
        request_ms: Any = None,
        user: Any = None,
        attributes: Mapping[str, Sequence[Any]] | None = None,
    ) -> ScoreRequest:
        """Checks and converts a request; raises UsageError if a value is wrong or a needed value is missing.

        `history` holds parallel lists: `item`, `action`, `surface`, `time_ms` and further fields. If it lacks `action`
        or `surface`, the names of LEFT_OUT are used. If it lacks `time_ms` and the model does not need times, all times
        are 0 and events keep their order. `attributes` maps a name to a list with one value (user, context) or with one
        value per candidate. If an attribute has no list, all its values are missing.
        """
        allowed = (*HISTORY_FIELDS, *self.fields)
        for field in history:
            if field not in allowed and f"history_{field}" not in self.skipped:
                close = suggest(field, allowed)
                raise UsageError(
                    f"history has the unknown field {field!r}",
                    allowed=f"allowed: {', '.join(allowed)}",
                    fix=f"did you mean {close!r}?" if close else "",
                )
        items = item_ids(self.signature, history.get("item", ()), "history item")
        count = len(items)
        times = _times(history.get("time_ms"), count)
        if "time_ms" not in history and self.needs_event_times and count:
            raise UsageError(
                "history lacks time_ms",
                allowed="this model reads the age of events",
                fix="send time_ms, the time of every event in ms since 1970 (on a server: the input history_time_ms)",
            )
        order = np.argsort(times, kind="stable") if count else np.zeros(0, dtype=np.int64)
        if self._keep is not None:
            order = order[-self._keep :]
        columns = {"item": Column(ID, items[order]), "time": Column(TIME, times[order])}
        unknown = {"time_ms": len(order)} if "time" in self.history and "time_ms" not in history else {}
        for name, known in self._known.items():
            names = _names(history.get(name), count, name)
            chosen_names = [names[position] or UNKNOWN_NAME for position in order]
            columns[name] = Column.of(STRING, chosen_names)
            unknown[name] = sum(chosen not in known for chosen in chosen_names)
        for name in self.fields:
            columns[name] = self._column(history.get(name), count, self.history[name], f"history {name}").take(order)
        if user is None and self.needs_user:
            raise UsageError(
                "user is missing",
                allowed="this model reads the user's id",
                fix="send `user`, the id of this user in the log",
            )
        chosen = item_ids(self.signature, candidates, "candidate")
        if len(chosen) == 0:
            raise UsageError(
                "candidates is empty",
                allowed="allowed: one or more item ids",
                fix="send the items to rank",
            )
        return ScoreRequest(
            history=columns,
            candidate_items=chosen,
            request_ms=self._moment(request_ms),
            user_id=None if user is None else _user_id(user, self.signature.user_type),
            attributes=self._attributes(attributes or {}, len(chosen)),
            num_unknown={name: number for name, number in unknown.items() if number},
        )

    def _moment(self, value: Any) -> int | None:
        if value is None:
            if self.needs_request_time:
                raise UsageError(
                    "request_time_ms is missing",
                    allowed="this model reads the time of the request",
                    fix="send request_time_ms, the time of the request in ms since 1970",
                )
            return None
        if problem := _not_int64(value):
            raise UsageError(f"request_time_ms is {problem}", allowed="allowed: whole ms since 1970")
        return int(value)

    def _attributes(self, given: Mapping[str, Sequence[Any]], num_candidates: int) -> dict[str, dict[str, Column]]:
        for name in given:
            if name not in self.attributes and name not in self.skipped:
                known, close = ", ".join(self.attributes) or "none", suggest(name, tuple(self.attributes))
                raise UsageError(
                    f"the request has the unknown attribute {name!r}",
                    allowed=f"this model reads: {known}",
                    fix=f"did you mean {close!r}?" if close else "leave the attribute out",
                )
        columns: dict[str, dict[str, Column]] = {entity: {} for entity in PREFIXES}
        for name, (entity, column, type_) in self.attributes.items():
            count = num_candidates if entity == "item" else 1
            columns[entity][column] = self._column(given.get(name), count, type_, name)
        return columns

    def _column(self, values: Sequence[Any] | None, count: int, type_: FeatureType, field: str) -> Column:
        """Does the same as `_values`, and raises UsageError if a value is outside the declared range of its column."""
        column = _values(values, count, type_, field)
        if field in self._ranges:
            low, high = self._ranges[field]
            given = column.values if column.present is None else column.values[column.present]
            if (given < low).any() or (given > high).any():
                raise UsageError(f"{field} is out of range", allowed=f"allowed: {low} to {high}")
        return column


def item_ids(signature: Signature, values: Sequence[Any] | NDArray[Any], field: str) -> NDArray[np.int64]:
    """Converts item values of the bundle's id type to int64 ids."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and signature.id_type == "int64":
        return values
    if signature.id_type == "int64":
        for position, value in enumerate(values):
            if problem := _not_int64(value):
                allowed = "allowed: a whole number of 64 bits, as in training"
                raise UsageError(f"{field} {position} is {problem}", allowed=allowed)
        return np.array([int(value) for value in values], dtype=np.int64)
    for position, value in enumerate(values):
        if not isinstance(value, str) or not value:
            allowed = "allowed: a non-empty string, as in training"
            raise UsageError(f"{field} {position} is {_type_name(value)}", allowed=allowed)
    return np.array([string_id(value) for value in values], dtype=np.int64)


def _values(values: Sequence[Any] | None, count: int, type_: FeatureType, field: str) -> Column:
    """Makes a column of `count` values. A value of None is missing; if `values` is None, all values are missing."""
    if values is None:
        # One missing value is repeated, because a list of None for 10,000 candidates would take 1 ms per attribute.
        return Column.of(type_, [None] * min(count, 1)).take(np.zeros(count, dtype=np.int64))
    if len(values) != count:
        raise UsageError(f"{field} has {len(values)} values", allowed=f"allowed: {count}")
    if isinstance(values, Column):
        return values
    if isinstance(values, np.ndarray) and type_.kind in DTYPES and type_.kind != "string":
        wanted = np.dtype(DTYPES[type_.kind])
        shape = (count, type_.width) if type_.kind == "vector" else (count,)
        if values.shape == shape and (values.dtype == wanted or (wanted.kind == "f" and values.dtype.kind == "f")):
            return Column(type_, np.ascontiguousarray(values, dtype=wanted))
    checked = [_checked(value, type_, field, position) for position, value in enumerate(values)]
    return Column.of(type_, checked)


def _checked(value: Any, type_: FeatureType, field: str, position: int) -> Any:
    """Checks and converts one value of an attribute. Raises a UsageError that names the position of a wrong value."""
    if value is None:
        return None
    kind = type_.kind
    if kind == "id" and isinstance(value, str):
        return string_id(value)
    if kind in ("int", "id", "time") and _not_int64(value) is None:
        return int(value)
    if kind == "float" and (isinstance(value, float | np.floating) or _not_int64(value) is None):
        return float(value)
    if kind == "bool" and isinstance(value, bool | np.bool_):
        return bool(value)
    if kind == "string" and isinstance(value, str):
        return value
    if kind in ("vector", "list") and isinstance(value, list | tuple | np.ndarray):
        element = FeatureType("float") if kind == "vector" else type_.of_elements()
        inner = [_checked(entry, element, field, position) for entry in value]
        if None not in inner and (kind == "list" or len(inner) == type_.width):
            return inner
    raise UsageError(f"{field} {position} is {_type_name(value)}", allowed=f"allowed: {type_.with_nullable(False)}")


def _user_id(value: Any, user_type: str) -> int:
    """Converts a user to the id that training used. A bundle without a user type accepts numbers and strings."""
    is_text = isinstance(value, str) and bool(value)
    if is_text and user_type != "int64":
        return string_id(value)
    problem = "a string" if is_text else _not_int64(value)
    if user_type == "string" and problem is None:
        problem = "a number"
    if problem:
        kinds = {"string": "a non-empty string", "int64": "a whole number of 64 bits"}
        raise UsageError(f"user is {problem}", allowed=f"allowed: {kinds.get(user_type, ' or '.join(kinds.values()))}")
    return int(value)


def _names(values: Sequence[Any] | None, count: int, field: str) -> Sequence[str]:
    if values is None:
        return [LEFT_OUT[field]] * count
    _check_length(values, count, field)
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise UsageError(f"history {field} {position} is {_type_name(value)}", allowed="allowed: a string")
    return values


def _times(values: Sequence[Any] | None, count: int) -> NDArray[np.int64]:
    if values is None:
        return np.zeros(count, dtype=np.int64)
    _check_length(values, count, "time_ms")
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return values
    for position, value in enumerate(values):
        if problem := _not_int64(value):
            raise UsageError(f"history time_ms {position} is {problem}", allowed="allowed: whole ms since 1970")
    return np.array([int(value) for value in values], dtype=np.int64)


def _check_length(values: Sequence[Any], count: int, field: str) -> None:
    if len(values) != count:
        raise UsageError(
            f"history has {count} items and {len(values)} values of {field}", allowed="allowed: one for each item"
        )


def _not_int64(value: Any) -> str | None:
    """Returns the reason why a value is not a whole number of 64 bits, or None if the value is valid."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        return _type_name(value)
    return None if INT64.min <= int(value) <= INT64.max else "out of range"


def _type_name(value: Any) -> str:
    if isinstance(value, str) and not value:
        return "an empty string"
    name = type(value).__name__
    return {"str": "a string", "int": "a number", "float": "a fraction", "bool": "a boolean"}.get(
        name, "missing" if value is None else name
    )
