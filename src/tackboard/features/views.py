"""Views choose events for every row without copying the events.

The events of all users lie end to end, and the events of each user are in the order of time. A `View` gives every row
(a request or a candidate) a range of an index into the events:

    events   0 1 2 3 4 5 6 7 8 9        two users: 0–5 and 6–9
    index    0   2   4   6 7            for example, only the clicks; None stands for all events in order
    row r    index[starts[r]:ends[r]]   the events that row r sees, oldest first

Filtering computes the new ranges with one cumulative count, a time window needs a binary search, and the newest n
events need a subtraction. None of these operations loops over the events of each row. `bounds` cuts the index into
segments, initially one segment per user. `segments` holds, for each row, the segment that contains the row's range.
`group` sorts the events of each segment by a key. The events that have the same key then form a segment of their own.
`requests` holds the request of each row if rows are candidates, and is None if rows are requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.features.column import offsets_of, ranges

Positions = NDArray[np.int64]
_ZERO = np.zeros(1, dtype=np.int64)
ANCHOR_STREAM = 43
"""Seed of the draws of anchors. It never changes, because training and serving must draw the same anchors."""
INT64_MIN, INT64_MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclasses.dataclass(slots=True, eq=False)
class View:
    """Holds a range of events for each row; see the picture at the top of this module. Treat a view as immutable."""

    index: Positions | None
    starts: Positions
    ends: Positions
    segments: Positions
    bounds: Positions
    requests: Positions | None = None
    _expanded: tuple[Positions, Positions] | None = dataclasses.field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> Positions:
        """The number of events of each row."""
        return self.ends - self.starts

    def at_index(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the values of the indexed events, in the index's order. `values` [events] has a value per event."""
        return values if self.index is None else values[self.index]

    def expanded(self) -> tuple[Positions, Positions]:
        """Returns (place in the index, row) of each event of each row, as two arrays. The result is cached."""
        if self._expanded is None:
            lengths = self.lengths
            places = ranges(self.starts, lengths)
            rows = (
                np.zeros(len(places), dtype=np.int64)
                if len(self) == 1
                else np.repeat(np.arange(len(self), dtype=np.int64), lengths)
            )
            self._expanded = places, rows
        return self._expanded

    def is_everything(self, num_events: int) -> bool:
        """Whether the rows, one after the other, see all `num_events` events, each once and in order."""
        starts, ends = self.starts, self.ends
        if self.index is not None or not len(starts) or starts[0] != 0 or ends[-1] != num_events:
            return False
        return bool((starts[1:] == ends[:-1]).all())

    def events_of_rows(self) -> Positions:
        """Returns the positions of the events of all rows, end to end."""
        if len(self.starts) == 1:
            start, end = int(self.starts[0]), int(self.ends[0])
            return np.arange(start, end, dtype=np.int64) if self.index is None else self.index[start:end]
        places, _ = self.expanded()
        return places if self.index is None else self.index[places]

    def segment_of_places(self) -> Positions:
        """Returns the segment of every place in the index."""
        return np.repeat(np.arange(len(self.bounds) - 1, dtype=np.int64), np.diff(self.bounds))

    def with_ranges(self, starts: Positions, ends: Positions) -> View:
        """Returns a view with the same index and other ranges."""
        return View(self.index, starts, ends, self.segments, self.bounds, self.requests)

    def spread(self, request_of: Positions) -> View:
        """Turns a view with a row per request into a view with a row per candidate."""
        starts, ends, segments = self.starts[request_of], self.ends[request_of], self.segments[request_of]
        return View(self.index, starts, ends, segments, self.bounds, request_of)

    def keep(self, condition: NDArray[np.bool_]) -> View:
        """Returns a view of only the events for which `condition` [events] is True."""
        if len(self) == 1:
            events = self.events_of_rows()
            index = events[condition[events]]
            ends = np.array([0, len(index)], dtype=np.int64)
            return View(index, _ZERO, ends[1:], _ZERO, ends, self.requests)
        kept = self.at_index(condition)
        before = offsets_of(kept)
        places = np.flatnonzero(kept)
        index = places if self.index is None else self.index[places]
        starts, ends = before[self.starts], before[self.ends]
        return View(index, starts, ends, self.segments, before[self.bounds], self.requests)

    def newest(self, count: int) -> View:
        """Returns a view of the last `count` events of each row."""
        return self.with_ranges(np.maximum(self.starts, self.ends - count), self.ends)

    def anchored(self, times: Positions, count: int, stride: int) -> View:
        """Returns a view of the last `count` events of each row, from the row's anchor on. `times` [events] are in ms.

        The anchor is drawn among the oldest `stride` of these events, by a hash of their times. So the same event stays
        the anchor of a growing row for a while. A row with fewer than `count` events keeps all its events.
        """
        view = self.newest(count)
        full = np.flatnonzero(view.lengths == count)
        places = view.starts[full, None] + np.arange(stride)
        draws = keyed_random.bits(ANCHOR_STREAM, times[places if self.index is None else self.index[places]])
        starts = view.starts.copy()
        starts[full] += draws.argmin(axis=1)
        return view.with_ranges(starts, view.ends)

    def from_time(self, times: Positions, oldest: Positions) -> View:
        """Returns a view of the events at or after `oldest` [rows]. `times` [events] must ascend within a segment."""
        return self.with_ranges(first_at_least(self.at_index(times), self.starts, self.ends, oldest), self.ends)

    def before_time(self, times: Positions, limit: Positions) -> View:
        """Returns a view of each row's events before the row's `limit` [rows]."""
        return self.with_ranges(self.starts, first_at_least(self.at_index(times), self.starts, self.ends, limit))

    def until_time(self, times: Positions, newest: Positions) -> View:
        """Returns a view of each row's events at or before the row's `newest` [rows]."""
        return self.with_ranges(self.starts, first_above(self.at_index(times), self.starts, self.ends, newest))

    def group(self, keys: Positions, wanted: Positions, known: NDArray[np.bool_] | None) -> View:
        """Returns a view of each row's events whose key (in `keys` [events]) equals the row's entry in `wanted` [rows].

        A row with `known` = False gets no events. If this view has one row, `wanted` may have any number of rows.
        """
        if len(self) == 1:
            return self._group_one(keys, wanted, known)
        code_of, code, num_codes = coded(self.at_index(keys), wanted)
        num_segments = len(self.bounds) - 1
        # Segment and key are combined into one number, so one sort is enough. If these numbers are small,
        # `positions_of` uses a table instead of a search.
        group_of = code_of + num_codes * self.segment_of_places() if num_segments > 1 else code_of
        order = np.argsort(group_of, kind="stable")
        sorted_groups = group_of[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = sorted_groups[1:] != sorted_groups[:-1]
        first = np.flatnonzero(is_first)
        group_bounds = np.append(first, len(order)).astype(np.int64) if len(first) else np.zeros(2, dtype=np.int64)
        found = code >= 0 if known is None else (code >= 0) & known
        number = code + num_codes * self.segments if num_segments > 1 else code
        group = positions_of(sorted_groups[first], np.where(found, number, 0), num_codes * num_segments)
        found &= group >= 0
        group = np.where(found, group, 0)
        starts = np.where(found, group_bounds[group], 0)
        ends = np.where(found, group_bounds[group + 1], 0)
        # Within a group the events keep their order. A row that sees only a part of its segment also sees only a part
        # of its group. Each entry of `numbers` combines an event's group and its old place. `numbers` is ascending, so
        # one search finds the starts of all rows, and another search finds the ends.
        narrow_start = not np.array_equal(self.starts, self.bounds[self.segments])
        narrow_end = not np.array_equal(self.ends, self.bounds[self.segments + 1])
        if narrow_start or narrow_end:
            numbers = (np.cumsum(is_first) - 1) * (len(order) + 1) + order
            base = group * (len(order) + 1)
            if narrow_end:
                ends = np.clip(np.searchsorted(numbers, base + self.ends), starts, ends)
            if narrow_start:
                starts = np.clip(np.searchsorted(numbers, base + self.starts), starts, ends)
        index = order if self.index is None else self.index[order]
        return View(index, starts, ends, group, group_bounds, self.requests)

    def _group_one(self, keys: Positions, wanted: Positions, known: NDArray[np.bool_] | None) -> View:
        """Does the work of `group` for a view of one row, without repeating that row for every wanted key."""
        events = self.events_of_rows()
        code_of, code, num_codes = coded(keys[events], wanted)
        # Group 0 is empty. Wanted values with code -1 get this group.
        bounds = np.zeros(num_codes + 2, dtype=np.int64)
        np.cumsum(np.bincount(code_of, minlength=num_codes), out=bounds[2:])
        group = code + 1 if known is None else (code + 1) * known
        requests = self.requests if len(wanted) == 1 else np.zeros(len(wanted), dtype=np.int64)
        # 16-bit integers are sorted in linear time.
        order = np.argsort(code_of.astype(np.uint16) if num_codes <= 1 << 16 else code_of, kind="stable")
        return View(events[order], bounds.take(group), bounds.take(group + 1), group, bounds, requests)


def coded(keys: Positions, wanted: Positions) -> tuple[Positions, Positions, int]:
    """Returns (codes of `keys`, codes of `wanted`, limit). Codes are integers below the limit and sort like the keys.

    A wanted value that equals a key gets the code of that key. Other wanted values get -1 or a code that no key has.
    """
    if not len(keys):
        return keys, np.full(len(wanted), -1, dtype=np.int64), 1
    low, high = int(np.minimum.reduce(keys)), int(np.maximum.reduce(keys))
    if high - low < 2 * len(keys) + 64:
        codes = wanted - low
        # As an unsigned number, a negative code is huge, so one comparison finds codes that are too small or too large,
        # even if the subtraction wraps around.
        codes[codes.view(np.uint64) > high - low] = -1
        return keys - low, codes, high - low + 1
    distinct, codes_of = np.unique(keys, return_inverse=True)
    codes = np.searchsorted(distinct, wanted)
    return codes_of, np.where(distinct.take(codes, mode="clip") == wanted, codes, -1), len(distinct)


def positions_of(numbers: Positions, wanted: Positions, limit: int) -> Positions:
    """Returns the position of each wanted number in `numbers`, or -1 if `numbers` does not contain it.

    `numbers` must be ascending. All numbers must be below `limit`.
    """
    if limit <= 4 * (len(wanted) + len(numbers)) + 64:
        table = np.full(limit, -1, dtype=np.int64)
        table[numbers] = np.arange(len(numbers))
        return table[wanted]
    if not len(numbers):
        return np.full(len(wanted), -1, dtype=np.int64)
    found = np.searchsorted(numbers, wanted)
    return np.where(numbers.take(found, mode="clip") == wanted, found, -1)


def first_at_least(values: NDArray[Any], starts: Positions, ends: Positions, wanted: Positions) -> Positions:
    """Returns for each row the first place in [start, end) whose value is at least `wanted`, or end if there is none.

    `values` must be ascending within each range. One binary search runs for all rows at the same time.
    """
    if len(starts) == 1:
        start = int(starts[0])
        return np.asarray(values[start : int(ends[0])].searchsorted(wanted[:1]) + start, dtype=np.int64)
    if len(starts) and (starts == starts[0]).all() and (ends == ends[0]).all():
        start = int(starts[0])
        return start + np.searchsorted(values[start : int(ends[0])], wanted, side="left").astype(np.int64)
    low, high = starts.copy(), ends.copy()
    rows = np.flatnonzero(low < high)
    while len(rows):
        middle = (low[rows] + high[rows]) >> 1
        less = values[middle] < wanted[rows]
        low[rows[less]] = middle[less] + 1
        high[rows[~less]] = middle[~less]
        rows = rows[low[rows] < high[rows]]
    return low


def first_above(values: NDArray[Any], starts: Positions, ends: Positions, wanted: Positions) -> Positions:
    """Returns for each row the first place in [start, end) whose value is above `wanted`, or end if there is none."""
    largest = wanted == INT64_MAX  # nothing is greater, and adding 1 would wrap around
    return np.where(largest, ends, first_at_least(values, starts, ends, np.where(largest, wanted, wanted + 1)))


class Visibility:
    """Finds the events that a request sees: the events of its user that were received strictly before the request.

    `received` [events] holds the received time of each event. The events of owner (user) o lie from offsets[o] to
    offsets[o + 1]. If events were received in the order in which they happened, a request sees the first events of its
    owner's range, and a binary search finds where these events end. Otherwise a request may see a later event but not
    an earlier one. The view's index then lists the request's events one by one. Treat this object as immutable.
    """

    def __init__(self, received: Positions, offsets: Positions) -> None:
        self._received = received
        self._offsets = offsets
        in_order = received[1:] >= received[:-1]
        borders = offsets[1:-1]
        in_order[borders[(borders > 0) & (borders < len(received))] - 1] = True
        self._in_order = bool(in_order.all())
        if not self._in_order:
            # `_earliest[i]` is the smallest received time of event i and all later events of the same user. So these
            # values ascend within a user, and a binary search is possible. `_latest[i]` is the largest received time of
            # event i and all earlier events of the same user.
            self._earliest = _running(received, offsets, np.minimum, -1)
            self._latest = _running(received, offsets, np.maximum, 1)

    def view(self, owners: Positions, request_ms: Positions, newest: int | None = None) -> View:
        """Returns the events that each request sees. `owners` is -1 for users without events.

        A caller that gives `newest` promises to read at most that number of newest events per request. If the index has
        to list the events of a request one by one, older events may then be left out of this list. The result of
        `view.newest(newest)` is the same with and without `newest`.
        """
        offsets, received = self._offsets, self._received
        known = owners >= 0
        safe = np.where(known, owners, 0)
        if len(offsets) == 1:
            return no_events(len(owners))
        starts = np.where(known, offsets[safe], 0)
        limits = np.where(known, offsets[safe + 1], 0)
        if self._in_order:
            return View(None, starts, first_at_least(received, starts, limits, request_ms), safe, offsets)
        ends = first_at_least(self._earliest, starts, limits, request_ms)
        late = np.flatnonzero((ends > starts) & (self._latest[np.maximum(ends - 1, 0)] >= request_ms))
        if not len(late):
            return View(None, starts, ends, safe, offsets)
        events, counts = self._listed(starts[late], ends[late], request_ms[late], newest)
        extra = len(received) + offsets_of(counts)
        starts[late], ends[late], safe = extra[:-1], extra[1:], safe.copy()
        safe[late] = len(offsets) - 1 + np.arange(len(late))
        index = np.concatenate([np.arange(len(received), dtype=np.int64), events])
        return View(index, starts, ends, safe, np.concatenate([offsets[:-1], extra]))

    def _listed(
        self, starts: Positions, ends: Positions, request_ms: Positions, newest: int | None
    ) -> tuple[Positions, Positions]:
        """Returns the events in [start, end) that each request sees, end to end, and their number per request."""
        lengths = ends - starts if newest is None else np.minimum(ends - starts, 2 * newest)
        while True:
            events, rows = ranges(ends - lengths, lengths), np.repeat(np.arange(len(ends)), lengths)
            seen = self._received[events] < request_ms[rows]
            counts = np.bincount(rows[seen], minlength=len(ends)).astype(np.int64)
            short = (lengths < ends - starts) & (counts < (newest or 0))
            if not short.any():
                return events[seen], counts
            lengths = np.where(short, np.minimum(ends - starts, 4 * lengths), lengths)


def visible_before(received: Positions, offsets: Positions, owners: Positions, request_ms: Positions) -> View:
    """Returns the events that each request sees. For several calls with the same events, use one `Visibility`."""
    return Visibility(received, offsets).view(owners, request_ms)


def _running(values: Positions, offsets: Positions, combine: Any, direction: int) -> Positions:
    """Returns running minima or maxima within each range of `offsets`, from the start (direction 1) or the end (-1)."""
    result = values.copy()
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    step, longest = 1, int(np.diff(offsets).max(initial=0))
    while step < longest:
        same = owner[step:] == owner[:-step]
        here, there = (result[step:], result[:-step]) if direction > 0 else (result[:-step], result[step:])
        here[same] = combine(here[same], there[same].copy())
        step *= 2
    return result


def no_events(num_rows: int) -> View:
    """Returns a view in which no row sees any event."""
    nothing = np.zeros(num_rows, dtype=np.int64)
    return View(None, nothing, nothing, nothing, np.zeros(2, dtype=np.int64))
