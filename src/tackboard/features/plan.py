"""The compiler takes the expressions of a feature set and returns a checked plan.

A plan is a list of nodes in an order in which they can be computed. Equal sub-expressions become one node, even if
several features contain them. The compiler gives every node its type and its level before any data is read. If a type
or a level is wrong, an error names the feature and its line in the code.

The level of a node says how often the node is computed. A constant is computed once. A node of event level is computed
once per event of the log. A node of request level depends on the user, the request, its context or aggregated events,
and is computed once per request. A node of candidate level also depends on the item, and is computed once per
candidate. So if a request has thousands of candidates, values that depend only on the user are computed only once.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tackboard.core.config import did_you_mean
from tackboard.core.errors import DataError, UsageError
from tackboard.features import kernels
from tackboard.features.entities import BUILT_IN, FUTURE, Events
from tackboard.features.expressions import NOWHERE, CodePlace, Expression
from tackboard.features.kernels.comparison import need_constant
from tackboard.features.operators import ABOUT_EVENTS, REGISTRY, Operator, TypeClash, need
from tackboard.features.types import BOOL, FLOAT, INT, SCALARS, STRING, VIEW, FeatureType, type_from_json

CONSTANT, EVENT, REQUEST, CANDIDATE = range(4)
LEVELS = ("constant", "event", "request", "candidate")
MAX_NODES = 20_000
COMES_FROM = {
    "item": "attributes of items come with `tackboard init --items FILE`",
    "user": "attributes of users come with `tackboard init --users FILE`",
    "event": "fields of events come with `tackboard init --field {}=COLUMN`",
    "context": "values of the context come with `tackboard init --context COLUMN`, a column of JSON objects",
}
LOOKS_AHEAD = {
    "allowed": "it is computed over the whole log, part of which comes after the request",
    "fix": "use what was received before: events.count(), events.last(events.time)",
}
kernels.load()


class SpecError(UsageError):
    """An error in the definition of a feature. The message names the feature and its line in the code."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation of a plan.

    If two nodes have the same `shape`, their lists have equal lengths in every row. `shape` is -1 if the value of the
    node is not a list. `maps_lists` means that the operator is applied to every element of a list.
    """

    op: str
    args: tuple[int, ...]
    params: Mapping[str, Any]
    type: FeatureType
    level: int
    place: CodePlace
    shape: int = -1
    maps_lists: bool = False

    @property
    def operator(self) -> Operator:
        """The registry's entry for `op`."""
        return REGISTRY[self.op]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds nodes in the order of their computation. `features` maps a feature's name to the position of its node."""

    nodes: tuple[Node, ...]
    features: Mapping[str, int]

    def sources(self) -> list[tuple[int, Node]]:
        """Returns the nodes that read data, with their positions."""
        return [(index, node) for index, node in enumerate(self.nodes) if node.op == "source"]

    @property
    def reads_events(self) -> bool:
        """Whether any feature reads events."""
        return any(node.op == "events" for node in self.nodes)

    @property
    def needs_event_times(self) -> bool:
        """Whether any feature depends on the age of events.

        This is so if a feature has a time window or a decay, or combines event times with the request's time.
        """
        if any(node.op in ("within", "between", "decayed_sum") for node in self.nodes):
            return True
        clocks: list[frozenset[str]] = []
        for node in self.nodes:
            met = frozenset().union(*(clocks[argument] for argument in node.args))
            if node.op == "source" and node.params["column"] == "time":
                met = frozenset([str(node.params["entity"])])
            if {"event", "request"} <= met:
                return True
            clocks.append(met)
        return False

    @property
    def needs_request_time(self) -> bool:
        """Whether any feature depends on the time of the request."""
        return self.needs_event_times or any(node.params["entity"] == "request" for _, node in self.sources())

    @property
    def newest_events(self) -> int | None:
        """How many newest events suffice for all features. None if no number suffices, or if no events are read."""
        whole = {index for index, node in enumerate(self.nodes) if node.op == "events"}
        readers = [node for node in self.nodes if whole.intersection(node.args)]
        if not readers or any(node.op not in ("newest", "anchored") for node in readers):
            return None
        return max(int(node.params["count"]) for node in readers)

    def trimmed(self, names: Iterable[str]) -> Plan:
        """Returns a plan of the named features and the nodes that they need. Raises UsageError for unknown names."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name not in self.features:
                raise UsageError(
                    f"there is no feature {name}",
                    allowed=f"features: {listed(self.features)}",
                    fix=did_you_mean(name, self.features),
                )
        needed: set[int] = set()
        stack = [self.features[name] for name in wanted]
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack += self.nodes[index].args
        order = sorted(needed)
        place = {old: new for new, old in enumerate(order)}
        nodes = tuple(
            dataclasses.replace(
                self.nodes[old],
                args=tuple(place[argument] for argument in self.nodes[old].args),
                shape=place.get(self.nodes[old].shape, -1),
            )
            for old in order
        )
        return Plan(nodes, {name: place[self.features[name]] for name in wanted})

    def readers(self, index: int) -> list[str]:
        """Returns the names of the features that depend on the node at position `index`."""
        dependent = {index}
        for later in range(index + 1, len(self.nodes)):
            if dependent.intersection(self.nodes[later].args):
                dependent.add(later)
        return [name for name, node in self.features.items() if node in dependent]

    def column_readers(self, entity: str, chosen: Callable[[str], bool]) -> set[str]:
        """Returns the names of the features that depend on a column of `entity` for which chosen(column) is True."""
        places = [i for i, node in self.sources() if node.params["entity"] == entity and chosen(node.params["column"])]
        return {name for index in places for name in self.readers(index)}

    def describe_source(self, index: int) -> str:
        """Describes a source for an error message: the first feature that reads it, the code line, and the column."""
        # A column that was computed ahead of time is named feature@number (folding.py).
        node, readers = self.nodes[index], list(dict.fromkeys(name.partition("@")[0] for name in self.readers(index)))
        first = (readers[0] if readers else "?") + (f" and {len(readers) - 1} more" if len(readers) > 1 else "")
        return f"feature {first} ({node.place}): {column_name(node.params)}"

    def missing_source(self, index: int, known: Iterable[str] = ()) -> DataError:
        """Returns the error for a source that the data lacks. `known` lists the columns that the entity does have."""
        params = self.nodes[index].params
        entity, column = str(params["entity"]), str(params["column"])
        # The cutoff is stricter than for a typo in a command. Otherwise `topic` would be suggested for `price`.
        close = next(iter(difflib.get_close_matches(column, list(known), n=1, cutoff=0.75)), None)
        return DataError(
            f"{self.describe_source(index)} is not in the data",
            allowed=COMES_FROM.get(entity, "").format(column),
            fix=f"did you mean {column_name({**params, 'column': close})}?"
            if close
            else f"add {column} to the data, or remove the feature",
        )

    def explain(self) -> str:
        """Returns the plan as text: one line per node with its level, type, number of uses and feature names."""
        uses = collections.Counter(argument for node in self.nodes for argument in node.args)
        named: dict[int, list[str]] = {}
        for name, index in self.features.items():
            uses[index] += 1
            named.setdefault(index, []).append(name)
        rows = []
        for index, node in enumerate(self.nodes):
            shared = f"shared ×{uses[index]}" if uses[index] > 1 and node.op not in ("source", "constant") else ""
            names = "→ " + ", ".join(named[index]) if index in named else ""
            rows.append((f"%{index}", LEVELS[node.level], str(node.type), self._spell(node), shared, names))
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
        ]
        return "\n".join([*lines, self._summary(uses)])

    def _summary(self, uses: Mapping[int, int]) -> str:
        computed = [count for index, count in uses.items() if self.nodes[index].op not in ("source", "constant")]
        saved = sum(count - 1 for count in computed)
        counts = [sum(1 for node in self.nodes if node.level == level) for level in range(4)]
        per = ", ".join(f"{count} per {name}" for count, name in zip(counts[1:], LEVELS[1:], strict=True) if count)
        return (
            f"{len(self.features)} features, {len(self.nodes)} nodes ({counts[0]} constants, {per}); "
            f"{saved} computations saved by sharing"
        )

    def _spell(self, node: Node) -> str:
        if node.op == "source":
            return column_name(node.params)
        if node.op == "constant":
            return repr(node.params["value"])
        params = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in node.params.items()]
        params = [text if len(text) <= 48 else text[:45] + "…" for text in params]
        return f"{node.op}({', '.join([*(f'%{argument}' for argument in node.args), *params])})"


class PlanBuilder:
    """Adds nodes one by one and checks each node. A node that is equal to an earlier node is not added again."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[str, int] = {}
        self._declared: dict[tuple[Any, Any], Mapping[str, Any]] = {}

    def add(self, op: str, args: tuple[int, ...], params: Mapping[str, Any], place: CodePlace) -> int:
        """Adds a node and returns its position. Raises TypeClash if inputs or parameters do not fit the operator."""
        key = _key(op, args, params)
        if key in self._known:
            return self._known[key]
        if len(self.nodes) >= MAX_NODES:
            raise TypeClash(f"the set has more than {MAX_NODES:,} operations")
        node = self._check(op, args, params, place)
        self.nodes.append(node)
        self._known[key] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _check(self, op: str, args: tuple[int, ...], params: Mapping[str, Any], place: CodePlace) -> Node:
        if op == "source":
            node = _source(params, place)
            # Executors identify a column by its name, so all declarations of the column must have the same type and
            # the same default. The declared ranges may differ, because each of these ranges is checked.
            declared = {name: value for name, value in params.items() if name not in ("minimum", "maximum")}
            if self._declared.setdefault((params["entity"], params["column"]), declared) != declared:
                raise TypeClash(
                    f"{column_name(params)} is declared in two ways", fix="declare it once for all features"
                )
            return dataclasses.replace(node, shape=len(self.nodes)) if node.type.kind == "list" else node
        if op == "constant":
            return Node(op, (), params, _constant_type(params.get("value")), CONSTANT, place)
        if op not in REGISTRY:
            raise TypeClash(
                f"there is no operator {op[:40]!r}", fix=did_you_mean(op, REGISTRY) or "use a newer tackboard"
            )
        operator = REGISTRY[op]
        operator.check_call(len(args), params)
        inputs = [self.nodes[argument] for argument in args]
        if op == "events":
            return Node(op, (), params, VIEW, REQUEST, place)
        if operator.family in ABOUT_EVENTS:
            return self._check_events(operator, args, inputs, params, place)
        for node in inputs:
            if node.type.kind == "view":
                raise TypeClash("it is given events", allowed="aggregate them first: count(), sum(…), collect(…)")
        level = _level([node.level for node in inputs])
        lists = [node for node in inputs if node.type.kind == "list"]
        if operator.elementwise and lists:
            return self._map_lists(operator, args, inputs, params, place)
        type_ = operator.rule(tuple(node.type for node in inputs), params)
        shape = -1
        if type_.kind == "list":
            shape = lists[0].shape if op == "differences" else len(self.nodes)
        return Node(op, args, params, type_, level, place, shape=shape)

    def _map_lists(
        self, operator: Operator, args: tuple[int, ...], inputs: list[Node], params: Mapping[str, Any], place: CodePlace
    ) -> Node:
        """Checks an elementwise operator on a list. All other inputs must be constants or lists of the same events."""
        lists = [node for node in inputs if node.type.kind == "list"]
        for node in inputs:
            if node.type.kind == "list" and node.shape != lists[0].shape:
                raise TypeClash(
                    "it is given two lists of different events", allowed="collect both from one selection of events"
                )
            if node.type.kind != "list" and node.level != CONSTANT:
                raise TypeClash(
                    f"it is given a list and {node.type}", allowed="give it a list with constants or with other lists"
                )
            if node.type.nullable:
                raise TypeClash(f"it is given {node.type}", fix="fill the missing list first: .fill_missing([])")
        element = operator.rule(tuple(node.type.of_elements() for node in inputs), params)
        if element.kind not in SCALARS:
            raise TypeClash(f"it would give a list of {element}", allowed="a list holds numbers, texts, ids or times")
        if element.nullable:
            raise TypeClash(
                "it may give missing elements",
                allowed="elements of a list are never missing",
                fix="work on the column before events.collect(…), and fill it there: .fill_missing(…)",
            )
        level = _level([node.level for node in inputs])
        return Node(operator.name, args, params, element.in_list(), level, place, shape=lists[0].shape, maps_lists=True)

    def _check_events(
        self, operator: Operator, args: tuple[int, ...], inputs: list[Node], params: Mapping[str, Any], place: CodePlace
    ) -> Node:
        if operator.name == "sequence":
            if len({node.shape for node in inputs if node.type.kind == "list"}) > 1:
                raise TypeClash(
                    "its columns are lists of different events", allowed="collect all from one selection of events"
                )
            type_ = operator.rule(tuple(node.type for node in inputs), params)
            return Node(operator.name, args, params, type_, _level([node.level for node in inputs]), place)
        if not inputs or inputs[0].type.kind != "view":
            raise TypeClash("its first input is not a selection of events")
        level = inputs[0].level
        for position, node in enumerate(inputs[1:], 1):
            is_key = operator.name == "matching" and position == 2
            if is_key and node.level == EVENT:
                raise TypeClash(
                    "the value to match is a column of the events", allowed="give a value of user, request or item"
                )
            if is_key:
                level = max(level, node.level)
            elif node.level not in (EVENT, CONSTANT):
                raise TypeClash(
                    f"it is given a value of the {LEVELS[node.level]}",
                    allowed="a column of the events, e.g. events.item",
                    fix="compare events with the request by events.matching(column, value)",
                )
        type_ = operator.rule(tuple(node.type for node in inputs), params)
        shape = -1
        if type_.kind == "list":
            shape = args[0] if operator.name == "collect" else len(self.nodes)
        return Node(operator.name, args, params, type_, level, place, shape=shape)


class Compiler:
    """Compiles named expressions to a plan; see the module's docstring."""

    def __init__(self, features: Mapping[str, Expression]) -> None:
        self._features = features
        self._builder = PlanBuilder()
        self._done: dict[str, int] = {}
        self._seen: dict[int, int] = {}
        self._path: list[str] = []

    def compile(self) -> Plan:
        """Returns the plan of all features. Raises a SpecError if the definition of a feature is wrong."""
        for name in self._features:
            self._feature(name)
        return Plan(tuple(self._builder.nodes), {name: self._done[name] for name in self._features})

    def _feature(self, name: str) -> int:
        if name in self._done:
            return self._done[name]
        expression = self._features[name]
        if name in self._path:
            circle = [*self._path[self._path.index(name) :], name]
            raise SpecError(
                f"feature {name} ({expression.place}) depends on itself: {' → '.join(circle)}",
                fix="remove one of the references",
            )
        self._path.append(name)
        try:
            index = self._expression(expression, name)
        except RecursionError:
            raise SpecError(
                f"feature {name} ({expression.place}) is nested too deeply",
                fix="define parts of it as separate features",
            ) from None
        self._path.pop()
        node = self._builder.nodes[index]
        if node.type.kind == "view":
            raise SpecError(
                f"feature {name} ({node.place}) is a selection of events", allowed="aggregate them: count(), collect(…)"
            )
        if node.level == EVENT:
            raise SpecError(
                f"feature {name} ({node.place}) is a column of the events, not a value of the request",
                allowed="aggregate it: events.last(…), events.sum(…), events.collect(…)",
            )
        self._done[name] = index
        return index

    def _expression(self, expression: Expression, name: str) -> int:
        if id(expression) in self._seen:
            return self._seen[id(expression)]
        if expression.op == "unknown_column":
            raise _unknown_column(expression, name)
        if expression.op == "feature":
            index = self._reference(expression, name)
        else:
            args = tuple(self._expression(argument, name) for argument in expression.args)
            try:
                index = self._builder.add(expression.op, args, expression.params, expression.place)
            except TypeClash as clash:
                raise spec_error(name, expression.place, expression.op, clash) from None
        self._seen[id(expression)] = index
        return index

    def _reference(self, expression: Expression, name: str) -> int:
        wanted = expression.params["name"]
        if wanted not in self._features:
            others = [other for other in self._features if other != name]
            raise SpecError(
                f"feature {name} ({expression.place}) refers to a feature {wanted!r}, which does not exist",
                allowed=f"other features: {listed(others)}" if others else "",
                fix=did_you_mean(str(wanted), others),
            )
        return self._feature(wanted)


def compile_features(features: Mapping[str, Expression]) -> Plan:
    """Returns the plan of named expressions. Raises a SpecError if the definition of a feature is wrong."""
    return Compiler(features).compile()


def compile_nodes(nodes: Sequence[Any], features: Mapping[str, Any]) -> Plan:
    """Compiles the nodes of a features.json to a plan. Raises DataError if a node or a feature is wrong."""
    builder = PlanBuilder()
    positions: list[int] = []
    for number, data in enumerate(nodes):
        try:
            op, args, params = data["op"], data.get("args", []), data.get("params", {})
            line = int(data.get("line", 0))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            raise DataError(f"operation {number} of the feature set cannot be read") from None
        valid = isinstance(op, str) and isinstance(params, dict) and isinstance(args, list)
        if not valid or not all(type(argument) is int and 0 <= argument < number for argument in args):
            raise DataError(f"operation {number} of the feature set is malformed, or an input does not come before it")
        place = CodePlace(str(data.get("file", "")), line) if line else NOWHERE
        try:
            positions.append(builder.add(op, tuple(positions[argument] for argument in args), params, place))
        except TypeClash as clash:
            readers = _names_reading(number, nodes, features)
            error = spec_error(readers or f"(operation {number})", place, op, clash)
            raise DataError(error.got, allowed=error.allowed, fix=error.fix) from None
        except (TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError):
            raise DataError(
                f"operation {number} of the feature set, {op}, has parameters that it does not take"
            ) from None
        node = builder.nodes[positions[-1]]
        if (
            op == "source"
            and params["column"] not in BUILT_IN[params["entity"]]
            and (node.type.nullable != (params.get("default") is None))
        ):
            raise DataError(
                f"operation {number} is {node.type}, but a column without a default must be nullable, "
                "and a column with a default must not be nullable"
            )
    indices: dict[str, int] = {}
    for name, index in features.items():
        if type(index) is not int or not 0 <= index < len(positions):
            raise DataError(f"feature {name} names operation {index!r}, which does not exist")
        node = builder.nodes[positions[index]]
        if node.type.kind == "view" or node.level == EVENT:
            raise DataError(f"feature {name} is not a value of a request")
        indices[name] = positions[index]
    return Plan(tuple(builder.nodes), indices)


def spec_error(feature: str, place: CodePlace, op: str, clash: TypeClash) -> SpecError:
    """Turns a TypeClash into the error that users see."""
    spelling = REGISTRY[op].spelling if op in REGISTRY else {"source": "column"}.get(op, op[:40])
    return SpecError(f"feature {feature} ({place}), {spelling}: {clash.got}", allowed=clash.allowed, fix=clash.fix)


def _key(op: str, args: tuple[int, ...], params: Mapping[str, Any]) -> str:
    try:
        return json.dumps([op, args, params], sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        if op == "constant":
            _constant_type(params.get("value"))
        named = [name for name, value in params.items() if not isinstance(value, bool | int | float | str | None)]
        wrong = named[0] if named else next(iter(params), "")
        raise TypeClash(
            f"its parameter {wrong} is {type(params.get(wrong)).__name__}",
            allowed="give numbers, texts or lists of them",
        ) from None


def _level(levels: Sequence[int]) -> int:
    if EVENT in levels and max(levels, default=CONSTANT) > EVENT:
        raise TypeClash(
            "it mixes a column of the events with a value of the request or of the candidate",
            allowed="aggregate the events first, or choose them by events.matching(column, value)",
        )
    return max(levels, default=CONSTANT)


def _constant_type(value: Any) -> FeatureType:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        if not -(1 << 63) <= value < (1 << 63):
            raise TypeClash(f"{value} does not fit into 64 bits")
        return INT
    if isinstance(value, float):
        if not math.isfinite(value):
            allowed = "give a finite number; to handle missing values, use .fill_missing(…)"
            raise TypeClash(f"{value} is not a finite number", allowed=allowed)
        return FLOAT
    if isinstance(value, str):
        return STRING
    called = getattr(value, "__name__", "") if callable(value) else ""
    if called:
        raise TypeClash(
            f"{called} is an operator",
            fix=f'call it: {called}(…); for a column named {called}, write events["{called}"] or item["{called}"]',
        )
    raise TypeClash(
        f"{type(value).__name__} is not a value of a feature",
        allowed="give an expression, a number, a string, True or False",
        fix="aggregate events: events.count(), events.last(column)" if isinstance(value, Events) else "",
    )


def _source(params: Mapping[str, Any], place: CodePlace) -> Node:
    entity, column = params.get("entity"), params.get("column")
    if entity not in BUILT_IN or not isinstance(column, str):
        raise TypeClash(f"there is no entity {entity!r}", allowed=f"entities: {', '.join(BUILT_IN)}")
    try:
        type_ = type_from_json(params.get("type"))
    except DataError as error:
        raise TypeClash(error.got, allowed=error.allowed) from None
    spelt = column_name(params)
    if column in FUTURE:
        raise TypeClash(f"{spelt} looks into the future", **LOOKS_AHEAD)
    if BUILT_IN[entity].get(column, type_) != type_:
        raise TypeClash(f"{spelt} is {BUILT_IN[entity][column]}, but declared as {type_}", fix="remove the declaration")
    if type_.kind in ("sequence", "view") or (type_.kind == "vector" and not 1 <= type_.width <= 65_536):
        raise TypeClash(f"a column cannot be {type_}")
    for bound in ("minimum", "maximum"):
        value = params.get(bound)
        if value is not None and not type_.is_number:
            raise TypeClash(f"{spelt} is {type_} with a {bound}", allowed="only numbers have a range")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value)):
            raise TypeClash(f"{spelt} has {bound} = {value!r:.40}", allowed="give a number")
    low, high = params.get("minimum"), params.get("maximum")
    if low is not None and high is not None and low > high:
        raise TypeClash(
            f"{spelt}: minimum = {low} is above maximum = {high}", allowed="give the smaller number as minimum"
        )
    level = {"item": CANDIDATE, "event": EVENT}.get(str(entity), REQUEST)
    if entity == "event" and type_.kind not in SCALARS:
        raise TypeClash(f"a column of the events cannot be {type_}", allowed="declare a number, text, id or time")
    default = params.get("default")
    if default is not None:
        need_constant(need((type_,), 0, SCALARS), default)
        if (low is not None and default < low) or (high is not None and default > high):
            span = f"{'-∞' if low is None else low} to {'∞' if high is None else high}"
            raise TypeClash(
                f"{spelt}: default = {default} is outside the declared range",
                allowed=f"declared range: {span}",
                fix="give a default within the range, or use .fill_missing(…) in the feature",
            )
    return Node("source", (), params, type_, level, place)


def _unknown_column(expression: Expression, name: str) -> SpecError:
    entity, column = expression.params["entity"], expression.params["column"]
    known = expression.params["known"]
    spelt = "events" if entity == "event" else entity
    if column in FUTURE:
        return SpecError(f"feature {name} ({expression.place}): {spelt}.{column} looks into the future", **LOOKS_AHEAD)
    return SpecError(
        f"feature {name} ({expression.place}): {spelt} has no column {column}",
        allowed=f"declared: {', '.join(known)}",
        fix=did_you_mean(column, known, f"{spelt}.") or f"declare it: {spelt} = {spelt.title()}({column}=…)",
    )


def column_name(params: Mapping[str, Any]) -> str:
    """Returns the name of a column in errors and plans, for example `events.dwell_ms`."""
    return f"{'events' if params['entity'] == 'event' else params['entity']}.{params['column']}"


def listed(names: Iterable[str], limit: int = 16) -> str:
    """Returns at most `limit` names as one line of text. The line ends with the number of omitted names, if any."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def _names_reading(number: int, nodes: Sequence[Any], features: Mapping[str, Any]) -> str:
    """Returns the names of the features in features.json that depend on operation `number`."""
    dependent = {number}
    for later in range(number + 1, len(nodes)):
        args = nodes[later].get("args", []) if isinstance(nodes[later], dict) else []
        if isinstance(args, list) and dependent.intersection(a for a in args if isinstance(a, int)):
            dependent.add(later)
    return ", ".join(str(name) for name, index in features.items() if index in dependent)
