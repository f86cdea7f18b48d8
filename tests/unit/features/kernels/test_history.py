"""Choosing and aggregating events, each operator against a loop over the events of each row."""

from __future__ import annotations

import math
import struct
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

    def check(self, result: Column, expected: Callable[[int], Any]) -> None:
        assert len(result) == len(self.rows)
        for row, got in enumerate(result.to_pylist()):
            assert same(got, expected(row)), (row, got, expected(row), self.values, self.rows)


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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is float and type(other) is float:
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and bool(one == other)


def wrap(value: int) -> int:
    return (value - MIN) % 2**64 + MIN


def rows_of(view: View) -> list[list[int]]:
    events, lengths = view.events_of_rows().tolist(), view.lengths.tolist()
    return [[events.pop(0) for _ in range(length)] for length in lengths]


# Choosing.


@settings(max_examples=30)
@given(data=st.data())
def test_events_are_those_received_before(data: st.DataObject) -> None:
    case = Case(data, "int")
    assert rows_of(history.events(case.frame)) == case.rows


@settings(max_examples=30)
@given(data=st.data())
def test_where(data: st.DataObject) -> None:
    case = Case(data, "bool")
    found = rows_of(history.where(case.frame, case.view, case.column))
    assert found == [[event for event in row if case.values[event]] for row in case.rows]


DURATIONS = st.sampled_from([1, 2, 5, history.MAX_DURATION_MS]) | st.integers(1, 20)


@settings(max_examples=30)
@given(data=st.data(), duration=DURATIONS)
def test_within(data: st.DataObject, duration: int) -> None:
    case = Case(data, "int")
    found = rows_of(history.within(case.frame, case.view, duration_ms=duration))
    assert found == [
        [event for event in row if moment - case.times[event] < duration]
        for row, moment in zip(case.rows, case.moments, strict=True)
    ]


@settings(max_examples=30)
@given(data=st.data(), newest=st.just(0) | DURATIONS, more=DURATIONS)
def test_between(data: st.DataObject, newest: int, more: int) -> None:
    case = Case(data, "int")
    oldest = newest + more
    found = rows_of(history.between(case.frame, case.view, oldest_ms=oldest, newest_ms=newest))
    assert found == [
        [event for event in row if newest <= moment - case.times[event] < oldest]
        for row, moment in zip(case.rows, case.moments, strict=True)
    ]


@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 4))
def test_newest(data: st.DataObject, count: int) -> None:
    case = Case(data, "int")
    assert rows_of(history.newest(case.frame, case.view, count=count)) == [row[-count:] for row in case.rows]


@pytest.mark.parametrize("kind", ["int", "id", "string", "time"])
@settings(max_examples=30)
@given(data=st.data())
def test_matching(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)
    one = data.draw(st.booleans())
    wanted = data.draw(
        st.lists(st.none() | VALUES[kind], min_size=1 if one else len(case.rows), max_size=1 if one else len(case.rows))
    )
    found = rows_of(history.matching(case.frame, case.view, case.column, Column.of(FeatureType(kind), wanted)))
    spread = wanted * len(case.rows) if one else wanted
    assert found == [
        [event for event in row if want is not None and case.values[event] == want]
        for row, want in zip(case.rows, spread, strict=True)
    ]


# Aggregating.


@settings(max_examples=30)
@given(data=st.data())
def test_count(data: st.DataObject) -> None:
    case = Case(data, "int")
    case.check(history.count(case.frame, case.view), lambda row: len(case.rows[row]))


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=30)
@given(data=st.data())
def test_last(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)
    case.check(
        history.last(case.frame, case.view, case.column),
        lambda row: case.values[case.rows[row][-1]] if case.rows[row] else None,
    )


@pytest.mark.parametrize("kind", history.COUNTABLE)
@settings(max_examples=30)
@given(data=st.data())
def test_distinct(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)
    case.check(history.count_distinct(case.frame, case.view, case.column), lambda row: len(set(case.present(row))))


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
@settings(max_examples=30)
@given(data=st.data())
def test_sum_and_mean(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)

    def total(values: list[Any]) -> float:
        result = 0.0
        for value in values:
            result += float(value)
        return result

    with np.errstate(all="ignore"):
        case.check(
            history.sum_(case.frame, case.view, case.column),
            lambda row: total(case.present(row)) if kind == "float" else wrap(sum(case.present(row))),
        )
        case.check(
            history.mean(case.frame, case.view, case.column),
            lambda row: total(case.present(row)) / len(case.present(row)) if case.present(row) else None,
        )


@pytest.mark.parametrize("kind", ["int", "float", "time"])
@settings(max_examples=30)
@given(data=st.data())
def test_max_and_min(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind)

    def extreme(row: int, choose: Any) -> Any:
        values = case.present(row)
        if any(value != value for value in values):
            return math.nan
        return (choose(values) + 0.0 if kind == "float" else choose(values)) if values else None

    case.check(history.max_(case.frame, case.view, case.column), lambda row: extreme(row, max))
    case.check(history.min_(case.frame, case.view, case.column), lambda row: extreme(row, min))


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


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
@settings(max_examples=30)
@given(data=st.data(), half_life=st.sampled_from([1, 3, 86_400_000, history.MAX_DURATION_MS]))
def test_decayed_sum(kind: str, data: st.DataObject, half_life: int) -> None:
    case = Case(data, kind)
    rate = -math.log(2.0) / half_life

    def expected(row: int) -> float:
        total = 0.0
        for event in case.rows[row]:
            if case.values[event] is not None:
                age = wrap(case.moments[row] - case.times[event])
                total += float(np.exp(np.array([age * rate]))[0]) * float(case.values[event])
        return total

    with np.errstate(all="ignore"):
        case.check(history.decayed_sum(case.frame, case.view, case.column, half_life_ms=half_life), expected)


@pytest.mark.parametrize("kind", ["int", "id", "string"])
@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 3))
def test_top(kind: str, data: st.DataObject, count: int) -> None:
    case = Case(data, kind)

    def expected(row: int) -> list[Any]:
        values = case.present(row)
        last = {value: place for place, value in enumerate(values)}
        return sorted(last, key=lambda value: (-values.count(value), -last[value]))[:count]

    case.check(history.top(case.frame, case.view, case.column, count=count), expected)


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=30)
@given(data=st.data())
def test_collect(kind: str, data: st.DataObject) -> None:
    case = Case(data, kind, nullable=False)
    found = history.collect(case.frame, case.view, case.column)
    assert found.type == FeatureType(kind).in_list()
    case.check(found, lambda row: [case.values[event] for event in case.rows[row]])


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


@pytest.mark.parametrize(
    ("name", "types", "params", "result"),
    [
        ("matching", (VIEW, ID, INT), {}, "view"),
        ("matching", (VIEW, STRING.with_nullable(True), STRING), {}, "view"),
        ("count", (VIEW,), {}, "int"),
        ("last", (VIEW, STRING), {}, "string?"),
        ("sum", (VIEW, BOOL), {}, "int"),
        ("sum", (VIEW, FLOAT.with_nullable(True)), {}, "float"),
        ("mean", (VIEW, INT), {}, "float?"),
        ("max", (VIEW, TIME), {}, "time?"),
        ("decayed_sum", (VIEW, INT.with_nullable(True)), {"half_life_ms": 1}, "float"),
        ("top", (VIEW, STRING.with_nullable(True)), {"count": 1}, "list[string]"),
        ("collect", (VIEW, BOOL), {}, "list[bool]"),
    ],
)
def test_results_have_types(name: str, types: tuple[FeatureType, ...], params: dict[str, Any], result: str) -> None:
    assert str(REGISTRY[name].rule(types, params)) == result
