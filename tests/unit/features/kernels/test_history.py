"""Choosing and aggregating events, each operator against a loop over the events of each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows
from tackboard.features.frame import Frame
from tackboard.features.kernels import history
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, VIEW, FeatureType
from tackboard.features.views import View, visible_before

MIN, MAX = -(2**63), 2**63 - 1
TIMES = st.sampled_from([MIN, MAX, MIN + 1, MAX - 1]) | st.integers(-5, 15)
FLOATS = st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, math.inf, -math.inf, 0.1, 1e308]) | st.floats()
INTS = st.sampled_from([0, 1, -1, MIN, MAX]) | st.integers(-3, 3)
STRINGS = st.sampled_from(["a", "b", "\u00e9", "e\u0301", ""])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(), "int": INTS, "float": FLOATS, "string": STRINGS, "id": INTS, "time": TIMES
}  # fmt: skip


Same = Callable[[Any, Any], bool]


class Case:
    """A few users' events with one column, and requests that see some of them."""

    def __init__(self, data: st.DataObject, kind: str, *, nullable: bool = True) -> None:
        users = data.draw(st.lists(st.lists(TIMES, min_size=1, max_size=6).map(sorted), max_size=3))
        self.times = [time for times in users for time in times]
        delays = data.draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(self.times), max_size=len(self.times)))
        received = [min(time + delay, MAX) for time, delay in zip(self.times, delays, strict=True)]
        ends = np.cumsum([0, *(len(times) for times in users)])
        requests = data.draw(st.lists(st.tuples(st.integers(-1, len(users) - 1), TIMES), max_size=5))
        self.moments = [moment for _, moment in requests]
        self.rows = [
            [] if owner < 0 else [e for e in range(ends[owner], ends[owner + 1]) if received[e] < moment]
            for owner, moment in requests
        ]
        owners = np.array([owner for owner, _ in requests], dtype=np.int64)
        request_ms = np.array(self.moments, dtype=np.int64)
        self.view = visible_before(np.array(received, dtype=np.int64), ends.astype(np.int64), owners, request_ms)
        self.frame = frame_of(self.times, request_ms, self.view)
        cells = st.none() | VALUES[kind] if nullable and data.draw(st.booleans()) else VALUES[kind]
        self.values = data.draw(st.lists(cells, min_size=len(self.times), max_size=len(self.times)))
        self.column = Column.of(FeatureType(kind), self.values)

    def present(self, row: int) -> list[Any]:
        """The values of a row's events that are not missing."""
        return [self.values[event] for event in self.rows[row] if self.values[event] is not None]


def frame_of(times: Sequence[int], request_ms: Any, view: View) -> Frame:
    return Frame(
        num_requests=len(request_ms),
        num_candidates=0,
        request_of=np.zeros(0, dtype=np.int64),
        request_ms=request_ms,
        event_times=np.array(times, dtype=np.int64),
        visible=view,
        columns={},
    )


def wrap(value: int) -> int:
    return (value - MIN) % 2**64 + MIN


def rows_of(view: View) -> list[list[int]]:
    events, lengths = view.events_of_rows().tolist(), view.lengths.tolist()
    return [[events.pop(0) for _ in range(length)] for length in lengths]


DURATIONS = st.sampled_from([1, 2, 5, history.MAX_DURATION_MS]) | st.integers(1, 20)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), oldest=DURATIONS, newest=st.just(0) | DURATIONS, count=st.integers(1, 4))
def test_choosing(data: st.DataObject, oldest: int, newest: int, count: int) -> None:
    case = Case(data, "bool")
    frame, view, oldest = case.frame, case.view, oldest + newest
    aged = [
        [(event, moment - case.times[event]) for event in row]
        for row, moment in zip(case.rows, case.moments, strict=True)
    ]
    assert rows_of(history.events(frame)) == case.rows
    assert rows_of(history.where(frame, view, case.column)) == [[e for e in row if case.values[e]] for row in case.rows]
    assert rows_of(history.newest(frame, view, count=count)) == [row[-count:] for row in case.rows]
    assert rows_of(history.anchored(frame, view, count=count, stride=1)) == [row[-count:] for row in case.rows]
    within = rows_of(history.within(frame, view, duration_ms=oldest))
    assert within == [[event for event, age in row if age < oldest] for row in aged]
    between = rows_of(history.between(frame, view, oldest_ms=oldest, newest_ms=newest))
    assert between == [[event for event, age in row if newest <= age < oldest] for row in aged]


@pytest.mark.parametrize("kind", ["int", "id", "string", "time"])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), one=st.booleans())
def test_matching(kind: str, data: st.DataObject, one: bool) -> None:
    case = Case(data, kind)
    count = 1 if one else len(case.rows)
    wanted = data.draw(st.lists(st.none() | VALUES[kind], min_size=count, max_size=count))
    found = rows_of(history.matching(case.frame, case.view, case.column, Column.of(FeatureType(kind), wanted)))
    assert found == [
        [event for event in row if want is not None and case.values[event] == want]
        for row, want in zip(case.rows, wanted * len(case.rows) if one else wanted, strict=True)
    ]


def total(values: list[Any]) -> float:
    result = 0.0
    for value in values:
        result += float(value)
    return result


def slow_extreme(values: list[Any], choose: Any) -> Any:
    if any(value != value for value in values):
        return math.nan
    chosen = choose(values, default=None)
    return chosen + 0.0 if isinstance(chosen, float) else chosen


def slow_top(values: list[Any], count: int) -> list[Any]:
    last = {value: place for place, value in enumerate(values)}
    return sorted(last, key=lambda value: (-values.count(value), -last[value]))[:count]


NUMBERS, ORDERED = ("bool", "int", "float"), ("int", "float", "time")
AGGREGATIONS: dict[str, tuple[Sequence[str], dict[str, Any], Callable[[list[Any]], Any]]] = {
    "count_distinct": (history.COUNTABLE, {}, lambda values: len(set(values))),
    "mean": (NUMBERS, {}, lambda values: total(values) / len(values) if values else None),
    "max": (ORDERED, {}, lambda values: slow_extreme(values, max)),
    "min": (ORDERED, {}, lambda values: slow_extreme(values, min)),
    "top": (("int", "id", "string"), {"count": 2}, lambda values: slow_top(values, 2)),
}
"""Of each operator the kinds it takes, parameters, and a twin of the values that are not missing."""


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (kinds, *_) in AGGREGATIONS.items() for kind in kinds]
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_aggregating(same_value: Same, name: str, kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)
    _, params, twin = AGGREGATIONS[name]
    found = REGISTRY[name].kernel(case.frame, case.view, case.column, **params).to_pylist()
    assert same_value(found, [twin(case.present(row)) for row in range(len(case.rows))])


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_count_last_and_collect(same_value: Same, kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)
    assert history.count(case.frame, case.view).to_pylist() == [len(row) for row in case.rows]
    last = [case.values[row[-1]] if row else None for row in case.rows]
    assert same_value(history.last(case.frame, case.view, case.column).to_pylist(), last)
    if None not in case.values:
        found = history.collect(case.frame, case.view, case.column)
        assert found.type == FeatureType(kind).in_list()
        assert same_value(found.to_pylist(), [[case.values[event] for event in row] for row in case.rows])


@pytest.mark.parametrize("kind", NUMBERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), half_life=st.sampled_from([1, 3, 86_400_000, history.MAX_DURATION_MS]))
def test_sum_and_decayed_sum(same_value: Same, kind: str, data: st.DataObject, half_life: int) -> None:
    case = Case(data, kind)
    rate = -math.log(2.0) / half_life

    def decayed(row: int) -> float:
        weighted = []
        for event in case.rows[row]:
            if case.values[event] is not None:
                age = wrap(case.moments[row] - case.times[event])
                weighted.append(float(np.exp(np.array([age * rate]))[0]) * float(case.values[event]))
        return total(weighted)

    add = total if kind == "float" else lambda values: wrap(sum(values))
    with np.errstate(all="ignore"):
        sums = history.sum_(case.frame, case.view, case.column).to_pylist()
        assert same_value(sums, [add(case.present(row)) for row in range(len(case.rows))])
        found = history.decayed_sum(case.frame, case.view, case.column, half_life_ms=half_life).to_pylist()
        assert same_value(found, [decayed(row) for row in range(len(case.rows))])


def test_an_extreme_does_not_depend_on_where_its_events_lie() -> None:
    """NumPy keeps now the one, now the other of -0.0 and 0.0, and of two NaNs."""
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0], [math.nan, -math.nan], [-math.nan, 1.0], [-0.0] * 20 + [0.0] * 20):
        column = Column.of(FLOAT, values)
        alone = frame_of(range(len(values)), np.array([99]), one_user(len(values)))
        for operator in (history.max_, history.min_):
            expected = operator(alone, alone.visible, column)
            for before in (1, 3, 7, 16):
                moved = Column.of(FLOAT, [5.0] * before + values)
                offsets = np.array([0, before, before + len(values)])
                times = np.arange(before + len(values))
                view = visible_before(times, offsets, np.array([0, 1]), np.array([99, 99]))
                found = operator(frame_of(times.tolist(), np.array([99, 99]), view), view, moved)
                assert len(differing_rows(found.take(np.array([1])), expected)) == 0


def one_user(count: int) -> View:
    return visible_before(np.arange(count), np.array([0, count]), np.array([0]), np.array([99]))


def test_sequence_holds_its_lists() -> None:
    frame = frame_of(
        range(3), np.array([2, 99]), visible_before(np.arange(3), np.array([0, 3]), np.array([0, 0]), np.array([2, 99]))
    )
    lists = [history.collect(frame, frame.visible, Column.of(type_, values)) for type_, values in
             ((ID, [1, 2, 3]), (STRING, ["a", "b", "c"]))]  # fmt: skip
    found = history.sequence(frame, *lists, names=["item", "word"])
    assert found.to_pylist() == [{"item": [1, 2], "word": ["a", "b"]}, {"item": [1, 2, 3], "word": ["a", "b", "c"]}]
    assert str(found.type) == "sequence{item: id, word: string}"


@pytest.mark.parametrize(
    "name", ["last", "count_distinct", "sum", "mean", "max", "min", "decayed_sum", "top", "collect"]
)
@pytest.mark.parametrize("times", [[], [1], [1, 2, 3]])
def test_a_constant_is_a_column_of_all_events(name: str, times: list[int]) -> None:
    view = visible_before(np.array(times, dtype=np.int64), np.array([0, len(times)] if times else [0]),
                          np.array([0 if times else -1]), np.array([99]))  # fmt: skip
    frame = frame_of(times, np.array([99]), view)
    params = {"decayed_sum": {"half_life_ms": 5}, "top": {"count": 2}}.get(name, {})
    kernel = REGISTRY[name].kernel
    short, long = Column.of(INT, [4]), Column.of(INT, [4] * len(times))
    assert len(differing_rows(kernel(frame, view, short, **params), kernel(frame, view, long, **params))) == 0


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]]])
def test_the_last_vector(values: list[list[float]]) -> None:
    count = len(values)
    view = visible_before(
        np.arange(count), np.array([0, count] if count else [0]), np.array([0 if count else -1]), np.array([99])
    )
    column = Column.of(FeatureType("vector", width=2), values)
    found = history.last(frame_of(range(count), np.array([99]), view), view, column)
    assert found.to_pylist() == [values[-1] if values else None] and found.values.shape == (1, 2)


# Rules.


@pytest.mark.parametrize(
    ("name", "types", "params"),
    [
        ("where", (VIEW, INT), {}),
        ("within", (VIEW,), {}),
        ("within", (VIEW,), {"duration_ms": "7"}),
        ("between", (VIEW,), {"oldest_ms": 5}),
        ("between", (VIEW,), {"oldest_ms": 5, "newest_ms": 6}),
        ("newest", (VIEW,), {"count": True}),
        ("matching", (VIEW, FLOAT, FLOAT), {}),
        ("matching", (VIEW, BOOL, BOOL), {}),
        ("matching", (VIEW, INT, ID), {}),
        ("matching", (VIEW, TIME, INT), {}),
        ("count_distinct", (VIEW, FLOAT), {}),
        ("sum", (VIEW, TIME), {}),
        ("max", (VIEW, BOOL), {}),
        ("decayed_sum", (VIEW, INT), {"half_life_ms": 0}),
        ("decayed_sum", (VIEW, INT), {"half_life_ms": 0.5}),
        ("top", (VIEW, FLOAT), {"count": 3}),
        ("top", (VIEW, INT), {"count": 10_001}),
        ("collect", (VIEW, INT.with_nullable(True)), {}),
        ("collect", (VIEW, FeatureType("vector", width=2)), {}),
        ("sequence", (INT.in_list(),), {"names": []}),
        ("sequence", (INT.in_list(),), {"names": [3]}),
        ("sequence", (INT.in_list(),) * 2, {"names": ["a", "a"]}),
        ("sequence", (INT,), {"names": ["a"]}),
        ("sequence", (INT.in_list().with_nullable(True),), {"names": ["a"]}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, types: tuple[FeatureType, ...], params: dict[str, Any]) -> None:
    with pytest.raises(TypeClash):
        REGISTRY[name].rule(types, params)
