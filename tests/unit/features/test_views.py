"""Views against lists: every selection of events gives, row by row, what a loop over the events gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core import keyed_random
from tackboard.features.views import (
    INT64_MAX,
    INT64_MIN,
    View,
    Visibility,
    coded,
    first_above,
    first_at_least,
    no_events,
    visible_before,
)

TIMES = st.sampled_from([int(INT64_MIN), int(INT64_MAX), 0]) | st.integers(-3, 12)


@dataclasses.dataclass
class Log:
    """Events of some users, end to end, each user's by time; requests of users, known and unknown."""

    offsets: Any
    times: Any
    received: Any
    keys: Any
    owners: Any
    request_ms: Any
    seen: list[list[int]]
    """What each request sees, found by a loop."""

    def visible(self) -> View:
        return visible_before(self.received, self.offsets, self.owners, self.request_ms)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    users = draw(st.lists(st.lists(st.tuples(TIMES, TIMES, st.integers(0, 2)), min_size=1, max_size=6), max_size=4))
    in_order = draw(st.booleans())
    for events in users:
        events.sort(key=lambda event: event[0])
    flat = [event for events in users for event in events]
    times = np.array([event[0] for event in flat], dtype=np.int64)
    received = times if in_order else np.array([event[1] for event in flat], dtype=np.int64)
    offsets = np.cumsum([0, *(len(events) for events in users)])
    requests = draw(st.lists(st.tuples(st.integers(-1, len(users) - 1), TIMES), max_size=5))
    seen = [
        [] if owner < 0 else [e for e in range(offsets[owner], offsets[owner + 1]) if received[e] < moment]
        for owner, moment in requests
    ]
    owners, moments = (np.array([request[side] for request in requests], dtype=np.int64) for side in (0, 1))
    keys = np.array([event[2] for event in flat], dtype=np.int64)
    return Log(offsets.astype(np.int64), times, received, keys, owners, moments, seen)


def rows_of(view: View) -> list[list[int]]:
    """The events of each row, read three ways that must agree."""
    assert len(view) == len(view.starts) == len(view.ends) == len(view.segments)
    index = np.arange(10_000) if view.index is None else view.index
    rows = [index[start:end].tolist() for start, end in zip(view.starts, view.ends, strict=True)]
    assert view.lengths.tolist() == [len(row) for row in rows]
    assert view.events_of_rows().tolist() == [event for row in rows for event in row]
    _, owners = view.expanded()
    assert owners.tolist() == [number for number, row in enumerate(rows) for _ in row]
    for start, end, segment in zip(view.starts, view.ends, view.segments, strict=True):
        assert start == end or view.bounds[segment] <= start <= end <= view.bounds[segment + 1]
    return rows


def from_anchor(log: Log, row: list[int], count: int, stride: int) -> list[int]:
    if len(row) < count:
        return row
    draws = [keyed_random.bits(43, log.times[event]).item() for event in row[-count:][:stride]]
    return row[-count:][draws.index(min(draws)) :]


@given(logs())
def test_a_request_sees_what_was_received_strictly_before_it(log: Log) -> None:
    assert rows_of(log.visible()) == log.seen


@given(logs(), st.data())
def test_choices_follow_each_other_in_any_order(log: Log, data: st.DataObject) -> None:
    view, rows, requests = log.visible(), log.seen, list(range(len(log.seen)))
    for _ in range(data.draw(st.integers(1, 4))):
        choice = data.draw(
            st.sampled_from(["keep", "newest", "anchored", "from", "before", "until", "group", "spread"])
        )
        if choice == "keep":
            kept = np.array(
                data.draw(st.lists(st.booleans(), min_size=len(log.times), max_size=len(log.times))), dtype=bool
            )
            view, rows = view.keep(kept), [[event for event in row if kept[event]] for row in rows]
        elif choice == "newest":
            count = data.draw(st.integers(1, 4))
            view, rows = view.newest(count), [row[-count:] for row in rows]
        elif choice == "anchored":
            count = data.draw(st.integers(1, 4))
            stride = data.draw(st.integers(1, count))
            view, rows = view.anchored(log.times, count, stride), [from_anchor(log, row, count, stride) for row in rows]
        elif choice in ("from", "before", "until"):
            moments = data.draw(st.lists(TIMES, min_size=len(rows), max_size=len(rows)))
            limits = np.array(moments, dtype=np.int64)
            apply = {"from": view.from_time, "before": view.before_time, "until": view.until_time}[choice]
            holds = {"from": int.__ge__, "before": int.__lt__, "until": int.__le__}[choice]
            view = apply(log.times, limits)
            rows = [[e for e in row if holds(int(log.times[e]), moments[number])] for number, row in enumerate(rows)]
        elif choice == "group":
            wanted = data.draw(st.lists(st.integers(-1, 3), min_size=len(rows), max_size=len(rows)))
            known = data.draw(st.none() | st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            mask = None if known is None else np.array(known, dtype=bool)
            view = view.group(log.keys, np.array(wanted, dtype=np.int64), mask)
            rows = [
                [e for e in row if log.keys[e] == wanted[number] and (known is None or known[number])]
                for number, row in enumerate(rows)
            ]
        elif view.requests is None:
            spread = sorted(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))) if rows else []
            view, rows = view.spread(np.array(spread, dtype=np.int64)), [rows[place] for place in spread]
            requests = spread
        assert rows_of(view) == rows
        assert requests == (list(range(len(rows))) if view.requests is None else view.requests.tolist())


@given(st.lists(st.tuples(st.lists(TIMES, max_size=6).map(sorted), TIMES), max_size=5))
def test_searches_within_ranges(rows: list[tuple[list[int], int]]) -> None:
    values = np.array([value for row, _ in rows for value in row], dtype=np.int64)
    ends = np.cumsum([len(row) for row, _ in rows]).astype(np.int64)
    starts = ends - np.array([len(row) for row, _ in rows], dtype=np.int64)
    wanted = np.array([value for _, value in rows], dtype=np.int64)
    at_least = [start + sum(value < want for value in row) for start, (row, want) in zip(starts, rows, strict=True)]
    above = [start + sum(value <= want for value in row) for start, (row, want) in zip(starts, rows, strict=True)]
    assert first_at_least(values, starts, ends, wanted).tolist() == at_least
    assert first_above(values, starts, ends, wanted).tolist() == above


@given(st.lists(TIMES, max_size=8).map(sorted), st.lists(TIMES, min_size=1, max_size=5))
def test_searches_of_many_rows_in_one_range(row: list[int], wanted: list[int]) -> None:
    values = np.array([7, *row, 3], dtype=np.int64)
    starts, ends = np.full(len(wanted), 1), np.full(len(wanted), 1 + len(row))
    found = first_at_least(values, starts, ends, np.array(wanted, dtype=np.int64))
    assert found.tolist() == [1 + sum(value < want for value in row) for want in wanted]


def test_only_requests_with_late_events_get_an_index_of_their_own() -> None:
    times = np.arange(6)
    in_order = visible_before(times, np.array([0, 3, 6]), np.array([0, 1]), np.array([2, 99]))
    assert in_order.index is None and rows_of(in_order) == [[0, 1], [3, 4, 5]]
    # The second user's second event came late, and only the first of the two requests is before that.
    received = np.array([0, 1, 2, 3, 50, 5])
    view = visible_before(received, np.array([0, 3, 6]), np.array([0, 1, 1]), np.array([99, 10, 60]))
    assert rows_of(view) == [[0, 1, 2], [3, 5], [3, 4, 5]]
    assert view.index is not None and len(view.index) == 6 + 2


def test_no_events() -> None:
    assert rows_of(no_events(2)) == [[], []]
    nobody = visible_before(np.zeros(0, np.int64), np.zeros(1, np.int64), np.array([-1]), np.array([5]))
    assert rows_of(nobody) == [[]]
    assert rows_of(nobody.group(np.zeros(0, np.int64), np.array([1]), None).keep(np.zeros(0, bool)).newest(3)) == [[]]


def test_a_view_is_not_changed_by_a_choice() -> None:
    view = visible_before(np.arange(6), np.array([0, 3, 6]), np.array([0, 1]), np.array([99, 99]))
    before = rows_of(view)
    view.keep(np.array([True, False] * 3)).newest(1).group(np.zeros(6, np.int64), np.array([0, 0]), None)
    assert rows_of(view) == before


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_groups_of_many_events(size: int) -> None:
    keys = np.arange(size * 3) % 5
    view = visible_before(
        np.arange(size * 3), np.array([0, size, size * 3]), np.array([0, 1]), np.array([10**6, 10**6])
    )
    for wanted in range(6):
        rows = rows_of(view.group(keys, np.full(2, wanted), None))
        assert rows == [[e for e in row if keys[e] == wanted] for row in (range(size), range(size, size * 3))]


@given(st.lists(TIMES), st.lists(TIMES), st.data())
def test_one_row_is_grouped_for_many_as_if_it_were_spread(
    keys: list[int], wanted: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(keys)))
    end = data.draw(st.integers(start, len(keys)))
    known = np.array(data.draw(st.lists(st.booleans(), min_size=len(wanted), max_size=len(wanted))), dtype=np.bool_)
    bounds = np.array([0, len(keys)])
    view = View(None, np.array([start]), np.array([end]), np.array([0]), bounds)
    grouped = view.group(np.array(keys, dtype=np.int64), np.array(wanted, dtype=np.int64), known)
    expected = [[e for e in range(start, end) if k and keys[e] == w] for w, k in zip(wanted, known, strict=True)]
    assert grouped.index is not None
    assert [grouped.index[s:e].tolist() for s, e in zip(grouped.starts, grouped.ends, strict=True)] == expected


@given(st.lists(TIMES, min_size=1), st.lists(TIMES))
def test_codes_tell_keys_apart_at_the_ends_of_int64(keys: list[int], wanted: list[int]) -> None:
    numbers, codes, count = coded(np.array(keys, dtype=np.int64), np.array(wanted, dtype=np.int64))
    code_of = dict(zip(keys, numbers.tolist(), strict=True))
    assert codes.tolist() == [code_of.get(one, code) for one, code in zip(wanted, codes.tolist(), strict=True)]
    assert all(-1 <= code < count for code in codes.tolist())
    assert not {code for one, code in zip(wanted, codes.tolist(), strict=True) if one not in code_of} & {
        *numbers.tolist()
    }
    assert sorted(code_of, key=lambda key: code_of[key]) == sorted(code_of)


@given(logs(), st.integers(1, 4))
def test_the_newest_of_what_is_seen_is_found_without_listing_all(log: Log, count: int) -> None:
    visibility = Visibility(log.received, log.offsets)
    view = visibility.view(log.owners, log.request_ms, count).newest(count)
    places = np.split(view.events_of_rows(), np.cumsum(view.lengths)[:-1]) if len(log.seen) else []
    assert [place.tolist() for place in places] == [seen[-count:] for seen in log.seen]


def test_a_long_history_with_late_events_is_not_listed_whole() -> None:
    times = np.arange(100_000)
    received = times + np.where(times % 7 == 0, 500, 0)
    requests = np.arange(50_000, 50_100)
    view = Visibility(received, np.array([0, 100_000])).view(np.zeros(100, dtype=np.int64), requests, 8)
    assert view.index is not None and len(view.index) < 100_000 + 100 * 64
    expected = [times[received < moment][-8:].tolist() for moment in requests]
    assert view.newest(8).events_of_rows().reshape(100, 8).tolist() == expected


def test_an_anchor_stays_while_a_history_grows() -> None:
    """The first event never goes back, and stays for (stride + 1) / 2 new events on average."""
    num_events, count, stride = 4000, 50, 20
    times = np.cumsum(1 + (keyed_random.uniform(3, np.arange(num_events)) * 10**6).astype(np.int64))
    ends = np.arange(num_events + 1)
    view = View(None, np.zeros_like(ends), ends, np.zeros_like(ends), np.array([0, num_events]))
    anchored = view.anchored(times, count, stride)
    assert (anchored.starts[:count] == 0).all() and (anchored.ends == ends).all()
    lengths = anchored.lengths[count:]
    assert set(lengths.tolist()) == set(range(count - stride + 1, count + 1))
    moves = np.diff(anchored.starts)
    assert (moves >= 0).all()
    assert len(lengths) / (moves > 0).sum() == pytest.approx((stride + 1) / 2, rel=0.1)
    # Events before the newest `count` say nothing, so a server that gets only these finds the same anchor.
    row = ends[1000:1001]
    alone = View(None, row - count, row, row * 0, np.array([0, num_events])).anchored(times, count, stride)
    assert alone.starts[0] == anchored.starts[1000]
    assert (view.anchored(times, count, 1).starts == view.newest(count).starts).all()
