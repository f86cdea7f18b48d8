"""Computes a plan (a compiled feature set) from the inputs in a frame (see frame.py). Both executors use this code.

A loop goes through the nodes in order and calls the kernel of each operator. If a kernel combines values of requests
with values of candidates, the value of a request is repeated for each of its candidates. A batch does this by
indexing. A single request uses NumPy's broadcasting if the kernel supports it. Both ways give the same bits, because
kernels compute every row from that row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tackboard.core.errors import DataError
from tackboard.features.column import Column
from tackboard.features.frame import Frame
from tackboard.features.operators import ABOUT_EVENTS
from tackboard.features.plan import CANDIDATE, CONSTANT, EVENT, REQUEST, Node, Plan
from tackboard.features.views import View, no_events

Step = Callable[[list[Any], Frame], Any]


class Program:
    """A plan that is ready to run. `run` may be called from several threads."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._outputs = [(name, index, plan.nodes[index].level) for name, index in plan.features.items()]
        self._constants: dict[int, Column] = {}
        self._sources: list[tuple[int, tuple[str, str]]] = []
        self._steps: list[tuple[int, Step]] = []
        values: list[Any] = [None] * len(plan.nodes)
        for index, node in enumerate(plan.nodes):
            if node.op == "source" and not {"minimum", "maximum"}.intersection(node.params):
                self._sources.append((index, _source_key(node)))
                continue
            step = self._step(index, node)
            if node.level == CONSTANT:
                with np.errstate(all="ignore"):
                    values[index] = self._constants[index] = step(values, _NO_FRAME)
            else:
                self._steps.append((index, step))

    def __reduce__(self) -> tuple[type[Program], tuple[Plan]]:
        return Program, (self.plan,)

    def run(self, frame: Frame) -> dict[str, Column]:
        """Returns all features by name: one row per candidate for features of candidate level, else one per request."""
        values: list[Any] = [None] * len(self.plan.nodes)
        for index, column in self._constants.items():
            values[index] = column
        columns = frame.columns
        for index, key in self._sources:
            if key not in columns:
                raise self.plan.missing_source(index)
            values[index] = columns[key]
        with np.errstate(all="ignore"):
            for index, step in self._steps:
                values[index] = step(values, frame)
        return {
            name: _expand(values[index], frame.num_requests) if level == CONSTANT else values[index]
            for name, index, level in self._outputs
        }

    def _step(self, index: int, node: Node) -> Step:
        if node.op == "source":
            return self._source(index, node)
        if node.op == "constant":
            constant = Column.of(node.type, [node.params["value"]])
            return lambda _values, _frame: constant
        kernel, params, args = node.operator.kernel, dict(node.params), node.args
        if node.maps_lists:
            return _map_lists(kernel, args, params)
        is_about_events = node.operator.family in ABOUT_EVENTS
        levels = [self.plan.nodes[argument].level for argument in args]
        spread = [node.level == CANDIDATE and level == REQUEST for level in levels]
        expand = [node.level != CONSTANT and level == CONSTANT for level in levels]
        broadcasts = node.operator.elementwise or node.operator.broadcasts
        plain = not any(spread) and (broadcasts or is_about_events or not any(expand))
        if plain and is_about_events:
            return lambda values, frame: kernel(frame, *[values[argument] for argument in args], **params)
        if plain:
            return _plain(functools.partial(kernel, **params) if params else kernel, args)

        def run(values: list[Any], frame: Frame) -> Any:
            inputs: list[Any] = [frame] if is_about_events else []
            for argument, spreads, expands in zip(args, spread, expand, strict=True):
                value = values[argument]
                if spreads:
                    value = _spread(value, frame, broadcasts=broadcasts)
                elif expands and not broadcasts and not is_about_events:
                    value = _expand(value, _num_rows(frame, node.level))
                inputs.append(value)
            return kernel(*inputs, **params)

        return run

    def _source(self, index: int, node: Node) -> Step:
        key = _source_key(node)

        def read(_values: list[Any], frame: Frame) -> Column:
            found = frame.columns.get(key)
            if found is None:
                raise self.plan.missing_source(index)
            self.check_range(found, index)
            return found

        return read

    def check_range(self, column: Column, index: int) -> None:
        """Raises DataError if a value in `column` lies outside the range that the source at `index` declares."""
        node = self.plan.nodes[index]
        low, high = node.params.get("minimum"), node.params.get("maximum")
        if low is None and high is None:
            return
        outside = np.False_ if low is None else column.values < low
        if high is not None:
            outside = outside | (column.values > high)
        if column.present is not None:
            outside &= column.present
        if outside.any():
            num_values = int(column.mask.sum())
            allowed = f"{'-∞' if low is None else low} to {'∞' if high is None else high}"
            raise DataError(
                f"{self.plan.describe_source(index)} is {column.values[outside][0]}; {int(outside.sum())} "
                f"of {num_values} values are out of range",
                allowed=f"declared range: {allowed}",
                fix="correct the data, or declare another range",
            )


def _source_key(node: Node) -> tuple[str, str]:
    return str(node.params["entity"]), str(node.params["column"])


def _plain(kernel: Callable[..., Any], args: tuple[int, ...]) -> Step:
    """Returns a step that calls the kernel with unchanged values. For one or two inputs, the step builds no list."""
    if len(args) == 1:
        (only,) = args
        return lambda values, _frame: kernel(values[only])
    if len(args) == 2:
        left, right = args
        return lambda values, _frame: kernel(values[left], values[right])
    return lambda values, _frame: kernel(*[values[argument] for argument in args])


def _num_rows(frame: Frame, level: int) -> int:
    return {EVENT: frame.num_events, REQUEST: frame.num_requests, CANDIDATE: frame.num_candidates}[level]


def _expand(column: Column, num_rows: int) -> Column:
    return column if len(column) == num_rows else column.take(np.zeros(num_rows, dtype=np.int64))


def _spread(value: Any, frame: Frame, *, broadcasts: bool) -> Any:
    """Repeats the value of each request for all candidates of the request.

    If there is a single request, two kinds of values are not repeated: a view (the chosen events of each row), because
    kernels accept a view of one row, and a column that the kernel broadcasts.
    """
    if isinstance(value, View):
        return value if frame.num_requests == 1 else frame.spread_view(value)
    if frame.num_requests == 1 and broadcasts:
        return value
    return value.take(frame.candidate_requests())


def _map_lists(kernel: Callable[..., Column], args: tuple[int, ...], params: dict[str, Any]) -> Step:
    def run(values: list[Any], _frame: Frame) -> Column:
        columns = [values[argument] for argument in args]
        shape = next(column for column in columns if column.offsets is not None)
        result = kernel(*[c.flat() if c.offsets is not None else c for c in columns], **params)
        return Column(result.type.in_list(), result.values, offsets=shape.offsets, dictionary=result.dictionary)

    return run


_NO_FRAME = Frame(
    num_requests=1,
    num_candidates=1,
    request_of=None,
    request_ms=None,
    event_times=np.zeros(0, dtype=np.int64),
    visible=no_events(0),
    columns={},
)
