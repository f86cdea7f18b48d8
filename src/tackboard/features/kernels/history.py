"""Operators that choose and aggregate events. Most kernels take a view (chosen events); all give a view or a column.

These kernels also get the frame, which knows the times of events and requests. Aggregations skip missing values of
their column. The exception is `last`, which gives the value of the last event even if that value is missing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column, offsets_of, ordered_sum, ranges, spread
from tackboard.features.frame import Frame
from tackboard.features.kernels.arithmetic import one_nan
from tackboard.features.kernels.text import text_keys
from tackboard.features.operators import AGGREGATING, CHOOSING, Example, Params, TypeClash, TypeRule, need, register
from tackboard.features.types import FLOAT, INT, NUMBERS, SCALARS, VIEW, FeatureType
from tackboard.features.views import INT64_MIN, Positions, View, coded

COUNTABLE = ("bool", "int", "string", "id", "time")
MAX_DURATION_MS = 200 * 366 * 86_400_000
DAY = 86_400_000
_NO_KEYS = np.zeros(0, dtype=np.int64)
EVENTS = {
    "item": [1, 2, 1, 3],
    "action": ["click", "save", "click", "hide"],
    "surface": ["home"] * 4,
    "time": [0, DAY, 2 * DAY, 3 * DAY],
}
"""The events in the examples of the operators: four events, a day apart."""
AT = {"events": EVENTS, "request_ms": 3 * DAY + 1}
_choosing = functools.partial(register, family=CHOOSING)
_aggregating = functools.partial(register, family=AGGREGATING)


def _gives(result: FeatureType, *column: str) -> TypeRule:
    """Returns a type rule that gives `result`. If `column` is given, it lists the allowed kinds of the input column."""

    def rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
        if column:
            need(types, 1, column)
        return result

    return rule


def _duration(params: Params, name: str, *, least: int) -> int:
    value = params.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeClash(
            f"{name} = {value!r} is not a duration", allowed="give a duration: days(7), hours(1), minutes(5)"
        )
    if value < 0:
        raise TypeClash(
            f"{name} = {value} ms looks into the future",
            allowed="a row sees only what was received before its request",
            fix="give the age of the events, 0 or more",
        )
    if not least <= value <= MAX_DURATION_MS:
        raise TypeClash(f"{name} = {value} ms is out of range", allowed=f"give a duration of {least} ms to 200 years")
    return value


@_choosing(
    "events",
    "events",
    _gives(VIEW),
    Example("events.count()", [4], AT),
    Example("events.count()", [3], AT | {"request_ms": 3 * DAY}),
)
def events(frame: Frame) -> View:
    """All events of the user that were received strictly before the request, oldest first."""
    return frame.visible


@_choosing(
    "where",
    "events.where(condition)",
    _gives(VIEW, "bool"),
    Example('events.where(events.action == "click").count()', [2], AT),
)
def where(frame: Frame, view: View, condition: Column) -> View:
    """The events for which a condition on their own columns is true; a missing condition counts as false."""
    held = condition.values if condition.present is None else condition.values & condition.present
    return view.keep(spread(held, frame.num_events))


def _within_rule(_types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    _duration(params, "duration_ms", least=1)
    return VIEW


@_choosing("within", "events.within(duration)", _within_rule, Example("events.within(days(2)).count()", [2], AT))
def within(frame: Frame, view: View, *, duration_ms: int) -> View:
    """The events that are younger than a duration at the time of the request."""
    return view.from_time(frame.event_times, _back(frame.times_of(view), duration_ms))


def _between_rule(_types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    oldest, newest = _duration(params, "oldest_ms", least=1), _duration(params, "newest_ms", least=0)
    if newest >= oldest:
        raise TypeClash(
            f"oldest_ms = {oldest} is not above newest_ms = {newest}",
            allowed="give the larger age first: events.between(days(7), days(1))",
        )
    return VIEW


@_choosing(
    "between",
    "events.between(oldest, newest)",
    _between_rule,
    Example("events.between(days(3), days(1)).count()", [2], AT),
)
def between(frame: Frame, view: View, *, oldest_ms: int, newest_ms: int) -> View:
    """The events whose age at the time of the request is below `oldest` and at least `newest`."""
    times = frame.times_of(view)
    narrowed = view.from_time(frame.event_times, _back(times, oldest_ms))
    if newest_ms:
        narrowed = narrowed.before_time(frame.event_times, _back(times, newest_ms))
    else:
        narrowed = narrowed.until_time(frame.event_times, times)
    return narrowed.with_ranges(np.minimum(narrowed.starts, narrowed.ends), narrowed.ends)


def _back(times: Positions, duration_ms: int) -> Positions:
    """Returns each time minus (`duration_ms` - 1), or the smallest int64 if the difference would be below it."""
    if len(times) == 1:
        return np.array([max(int(times[0]) - (duration_ms - 1), INT64_MIN)], dtype=np.int64)
    with_room = times >= INT64_MIN + duration_ms
    return np.where(with_room, times - np.int64(duration_ms - 1), INT64_MIN)


def _check_count(params: Params, most: int, what: str) -> None:
    count = params.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise TypeClash(f"count = {count!r} is out of range", allowed=f"give 1 to {most:,} {what}")


def _newest_rule(_types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    _check_count(params, 1_000_000, "events")
    return VIEW


@_choosing(
    "newest",
    "events.newest(count)",
    _newest_rule,
    Example('events.newest(3).where(events.action == "click").count()', [1], AT),
)
def newest(frame: Frame, view: View, *, count: int) -> View:
    """The last `count` events. The order of choices matters: the example takes the newest three events, and then the
    clicks among these three."""
    del frame
    return view.newest(count)


def _anchored_rule(_types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    _check_count(params, 1_000_000, "events")
    stride, count = params.get("stride"), params["count"]
    if not isinstance(stride, int) or isinstance(stride, bool) or not 1 <= stride <= count:
        raise TypeClash(f"stride = {stride!r} is out of range", allowed=f"give 1 to {count:,}, at most the count")
    return VIEW


@_choosing(
    "anchored",
    "events.anchored(count, stride)",
    _anchored_rule,
    Example("events.anchored(4, 3).collect(events.item)", [[2, 1, 3]], AT),
)
def anchored(frame: Frame, view: View, *, count: int, stride: int) -> View:
    """The last `count` events, without the events before an anchor. The anchor is one of the oldest `stride` of the
    last `count` events. A hash of their times chooses it, so the first event stays the same while some new events
    arrive. If there are fewer than `count` events, all of them are chosen."""
    return view.anchored(frame.event_times, count, stride)


def _matching_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    column, value = need(types, 1, ("int", "id", "string", "time")), types[2]
    if value.kind != column.kind and (column.kind, value.kind) != ("id", "int"):
        raise TypeClash(f"{column} is matched with {value}", allowed="give two values of one kind")
    return VIEW


@_choosing(
    "matching",
    "events.matching(column, value)",
    _matching_rule,
    Example("events.matching(events.item, x.hash_id()).count()", [2, 0], AT | {"x": ("int", [1, 9])}),
    Example(
        "events.matching(events.item, x.hash_id()).last(events.time).is_missing()",
        [False, True],
        AT | {"x": ("int", [1, 9])},
    ),
)
def matching(frame: Frame, view: View, column: Column, value: Column) -> View:
    """The events whose column equals a value of the request or of the candidate. Missing values match nothing."""
    if column.present is not None:
        view = view.keep(spread(column.present, frame.num_events))
    keys, wanted = _keys(column, value)
    if len(keys) != frame.num_events:
        keys = np.broadcast_to(keys, (frame.num_events,))
    if len(view) != len(wanted):
        if len(wanted) == 1:
            wanted = np.broadcast_to(wanted, (len(view),))
        elif len(view) != 1:
            view = frame.spread_view(view)
    return view.group(keys, wanted, spread(value.present, len(wanted)))


def _keys(*columns: Column) -> list[Positions]:
    """Returns int64 keys for columns of one kind. Equal values have equal keys. Keys of strings are small numbers."""
    if columns[0].dictionary is not None:
        return text_keys(*columns)
    return [column.values.astype(np.int64, copy=False) for column in columns]


def _groups(rows: Positions, keys: Positions) -> tuple[Positions, Positions]:
    """Returns (order, groups). `order` sorts the pairs (row, key) stably. `groups` holds a number per sorted pair.

    Equal pairs have equal numbers. `rows` must be ascending. Sorting by one combined number is several times faster
    than sorting by two keys, because the combined numbers of ascending rows are partly sorted already.
    """
    if not len(rows) or rows[0] == rows[-1]:
        order = np.argsort(keys, kind="stable")
        return order, keys[order]
    codes, _, num_codes = coded(keys, _NO_KEYS)
    pairs = rows * num_codes + codes
    order = np.argsort(pairs, kind="stable")
    return order, pairs[order]


@_aggregating("count", "events.count()", _gives(INT), Example('events.where(events.action == "like").count()', [0], AT))
def count(frame: Frame, view: View) -> Column:
    """The number of events; 0 if there are none."""
    del frame
    return Column(INT, view.lengths)


@_aggregating(
    "last",
    "events.last(column)",
    lambda types, _params: types[1].with_nullable(True),
    Example('events.where(events.action == "click").last(events.item)', [1], AT),
)
def last(frame: Frame, view: View, column: Column) -> Column:
    """The column's value at the last event. Missing if there is no event, or if the value of that event is missing."""
    if frame.num_events == 0:
        empty = np.zeros((len(view), *column.values.shape[1:]), dtype=column.values.dtype)
        dictionary = None if column.dictionary is None else np.array([""], dtype=np.object_)
        return Column(column.type, empty, present=np.zeros(len(view), dtype=np.bool_), dictionary=dictionary)
    some = view.ends > view.starts
    place = np.where(some, view.ends - 1, 0)
    if view.index is not None:
        place = view.index[place] if len(view.index) else np.zeros(len(view), dtype=np.int64)
    values = _all_events(column, frame).take(place)
    present = some if values.present is None else some & values.present
    return Column(values.type, values.values, present=present, dictionary=values.dictionary)


@_aggregating(
    "count_distinct",
    "events.distinct(column)",
    _gives(INT, *COUNTABLE),
    Example("events.distinct(events.item)", [3], AT),
)
def count_distinct(frame: Frame, view: View, column: Column) -> Column:
    """The number of distinct values of the column among the events."""
    column = _all_events(column, frame)
    if column.present is not None:
        view = view.keep(column.present)
    (keys,) = _keys(column)
    if len(view) == 1:
        ordered = np.sort(keys[view.events_of_rows()])
        num_distinct = min(len(ordered), 1) + np.count_nonzero(ordered[1:] != ordered[:-1])
        return Column(INT, np.array([num_distinct], dtype=np.int64))
    order, groups = _groups(view.segment_of_places(), view.at_index(keys))
    # An event counts if no earlier event in the range of the row has the same value.
    previous = np.full(len(order), -1, dtype=np.int64)
    same = groups[1:] == groups[:-1]
    previous[order[1:][same]] = order[:-1][same]
    places, rows = view.expanded()
    is_new = previous[places] < view.starts[rows]
    return Column(INT, np.bincount(rows[is_new], minlength=len(view)).astype(np.int64))


def _sum_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return FLOAT if need(types, 1, NUMBERS).kind == "float" else INT


@_aggregating(
    "sum",
    "events.sum(column)",
    _sum_rule,
    Example('events.sum(if_else(events.action == "click", 1.0, 0.5))', [3.0], AT),
)
def sum_(frame: Frame, view: View, column: Column) -> Column:
    """The sum of the column; 0 if there are no events. Floats are added in the order of the events; ints wrap around at
    64 bits."""
    column = _all_events(column, frame)
    if column.type.kind == "float":
        values, rows = _values_of_rows(view, column)
        return Column(FLOAT, ordered_sum(values, rows, len(view)))
    values = column.values.astype(np.int64, copy=False)
    if len(view) == 1:
        view = view if column.present is None else view.keep(column.present)
        return Column(INT, np.add.reduce(values[view.events_of_rows()], keepdims=True))
    if column.present is not None:
        values = np.where(column.present, values, 0)
    before = offsets_of(view.at_index(values))
    return Column(INT, before[view.ends] - before[view.starts])


@_aggregating(
    "mean",
    "events.mean(column)",
    _gives(FLOAT.with_nullable(True), *NUMBERS),
    Example('events.mean(if_else(events.action == "hide", 0.0, 1.0))', [0.75], AT),
)
def mean(frame: Frame, view: View, column: Column) -> Column:
    """The mean of the column. Its values are added in the order of the events. Missing if no event has a value."""
    values, rows = _values_of_rows(view, _all_events(column, frame))
    counts = np.bincount(rows, minlength=len(view))
    total = ordered_sum(values.astype(np.float64, copy=False), rows, len(view))
    return Column(FLOAT, total / np.maximum(counts, 1), present=counts > 0)


def _extreme_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    return need(types, 1, ("int", "float", "time")).with_nullable(True)


@_aggregating(
    "max",
    "events.max(column)",
    _extreme_rule,
    Example("events.max(events.time).seconds_since(events.min(events.time))", [259200.0], AT),
)
def max_(frame: Frame, view: View, column: Column) -> Column:
    """The largest value of the column; NaN if any value is NaN. -0.0 becomes 0.0. Missing if no event has a value."""
    return _extreme(frame, view, column, np.maximum)


@_aggregating(
    "min",
    "events.min(column)",
    _extreme_rule,
    Example("request.time.seconds_since(events.min(events.time))", [259200.001], AT),
)
def min_(frame: Frame, view: View, column: Column) -> Column:
    """The smallest value of the column; NaN if any value is NaN. -0.0 becomes 0.0. Missing if no event has a value."""
    return _extreme(frame, view, column, np.minimum)


def _extreme(frame: Frame, view: View, column: Column, choose: Any) -> Column:
    values, rows = _values_of_rows(view, _all_events(column, frame))
    counts = np.bincount(rows, minlength=len(view))
    some = counts > 0
    result = np.zeros(len(view), dtype=values.dtype)
    if len(values):
        result[some] = choose.reduceat(values, offsets_of(counts[some])[:-1])
    if result.dtype == np.float64:
        # If both -0.0 and 0.0 occur, or several different NaNs, NumPy's result depends on the processor.
        result = one_nan(result + 0.0)
    return Column(column.type, result, present=some)


def _decay_rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    need(types, 1, NUMBERS)
    _duration(params, "half_life_ms", least=1)
    return FLOAT


@_aggregating(
    "decayed_sum",
    "events.decayed_sum(column, half_life=…)",
    _decay_rule,
    Example("events.within(days(1)).decayed_sum(8.0, half_life=days(1)).floor()", [7.0], AT),
)
def decayed_sum(frame: Frame, view: View, column: Column, *, half_life_ms: int) -> Column:
    """The sum of the column, with each value multiplied by 0.5 to the power of age / half-life.

    Values are added in the order of the events. Ages of more than 292 million years wrap around.
    """
    column = _all_events(column, frame)
    if column.present is not None:
        view = view.keep(column.present)
    events_, (_, rows) = view.events_of_rows(), view.expanded()
    times = frame.times_of(view)
    age_ms = (times if len(view) == 1 else times[rows]) - frame.event_times[events_]
    weight = np.exp(age_ms * (-math.log(2.0) / half_life_ms))
    return Column(FLOAT, ordered_sum(weight * column.values[events_], rows, len(view)))


def _top_rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    column = need(types, 1, ("int", "id", "string"))
    _check_count(params, 10_000, "values")
    return column.in_list()


@_aggregating("top", "events.top(column, count)", _top_rule, Example("events.top(events.item, 2)", [[1, 3]], AT))
def top(frame: Frame, view: View, column: Column, *, count: int) -> Column:
    """The `count` most frequent values of the column, most frequent first. Among equally frequent values, the more
    recent value comes first."""
    column = _all_events(column, frame)
    if column.present is not None:
        view = view.keep(column.present)
    (keys,) = _keys(column)
    if len(view) == 1:
        return _top_of_one(view.events_of_rows(), keys, column, count)
    events_, (places, rows) = view.events_of_rows(), view.expanded()
    # Keys are replaced by small codes before they are repeated for every row, because this is less work.
    codes = coded(view.at_index(keys), _NO_KEYS)[0][places]
    order, groups = _groups(rows, codes)
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = groups[1:] != groups[:-1]
    first = np.flatnonzero(is_first)
    end = np.append(first[1:], len(order)).astype(np.int64)
    newest_ = order[end - 1] if len(order) else order
    # The sort is stable, so the last event of a group is the newest event with that value.
    ranked = _ranked(rows[newest_], end - first, newest_)
    per_row = np.bincount(rows[newest_], minlength=len(view)).astype(np.int64)
    lengths = np.minimum(per_row, count)
    chosen = ranked[ranges(np.cumsum(per_row) - per_row, lengths)]
    return Column(
        column.type.in_list(),
        column.values[events_[chosen]],
        offsets=offsets_of(lengths),
        dictionary=column.dictionary,
    )


def _top_of_one(events_: Positions, keys: Positions, column: Column, count: int) -> Column:
    """Does the work of `top` for one row."""
    keys = keys[events_]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_last = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_last[:-1])
    ends = np.flatnonzero(is_last)
    counts = ends.copy()
    counts[1:] -= ends[:-1]
    if len(counts):
        counts[0] += 1  # the first group begins at 0, so its size is its last index plus 1
    # The count and the newest event of a group are packed into one number. No two groups have the same number.
    packed = counts * len(keys) + order[ends]
    packed.sort()
    chosen = events_[packed[::-1][:count] % max(len(keys), 1)]
    offsets = np.array([0, len(chosen)], dtype=np.int64)
    return Column(column.type.in_list(), column.values[chosen], offsets=offsets, dictionary=column.dictionary)


def _ranked(rows: Positions, counts: Positions, newest: Positions) -> Positions:
    """Sorts `newest` by ascending row, then by descending count, then by descending `newest`."""
    if not len(rows) or rows[0] == rows[-1]:
        return newest[np.lexsort((-newest, -counts))]
    most, last = int(counts.max()), int(newest.max())
    count_bits, place_bits = most.bit_length(), last.bit_length()
    if int(rows.max()).bit_length() + count_bits + place_bits > 62:
        return newest[np.lexsort((-newest, -counts, rows))]
    # Sorting one packed number is several times faster than sorting by three keys. No two packed numbers are equal.
    packed = (((rows << count_bits) + (most - counts)) << place_bits) + (last - newest)
    packed.sort(kind="stable")  # a stable sort is faster here, because the rows are ascending already
    return last - (packed & ((1 << place_bits) - 1))


def _collect_rule(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    column = need(types, 1, SCALARS)
    if column.nullable:
        raise TypeClash(
            f"the column is {column}", allowed="elements of a list are never missing", fix="use .fill_missing(…) first"
        )
    return column.in_list()


@_aggregating(
    "collect", "events.collect(column)", _collect_rule, Example("events.newest(2).collect(events.item)", [[1, 3]], AT)
)
def collect(frame: Frame, view: View, column: Column) -> Column:
    """A list of the column's values at all chosen events, oldest first."""
    column = _all_events(column, frame)
    return Column(
        column.type.in_list(),
        column.values if view.is_everything(len(column.values)) else column.values[view.events_of_rows()],
        offsets=offsets_of(view.lengths),
        dictionary=column.dictionary,
    )


def _sequence_rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    names = params.get("names")
    if not isinstance(names, list) or len(names) != len(types) or not names:
        raise TypeClash("it has no columns", allowed="e.g. sequence(item=recent.collect(events.item))")
    if not all(isinstance(name, str) and name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise TypeClash(f"its columns are named {str(names)[:80]}", allowed="give different names, as in Python")
    for name, type_ in zip(names, types, strict=True):
        if type_.kind != "list" or type_.nullable:
            raise TypeClash(f"its column {name} is {type_}", allowed="give lists made by events.collect(…)")
    return FeatureType("sequence", columns=tuple(zip(map(str, names), types, strict=True)))


@_aggregating(
    "sequence",
    "sequence(name=list, …)",
    _sequence_rule,
    Example(
        "sequence(item=events.newest(2).collect(events.item), gap_ms=events.newest(2).collect(events.time)"
        ".differences())",
        [{"item": [1, 3], "gap_ms": [0, DAY]}],
        AT,
    ),
)
def sequence(frame: Frame, *columns: Column, names: list[str]) -> Column:
    """One feature that holds parallel lists of the same events, for a sequence model."""
    del frame
    type_ = FeatureType("sequence", columns=tuple((n, c.type) for n, c in zip(names, columns, strict=True)))
    return Column(type_, np.zeros(0), fields=dict(zip(names, columns, strict=True)))


def _all_events(column: Column, frame: Frame) -> Column:
    """Returns the column with one value per event. A constant is repeated for every event."""
    if len(column) == frame.num_events:
        return column
    return column.take(np.zeros(frame.num_events, dtype=np.int64))


def _values_of_rows(view: View, column: Column) -> tuple[NDArray[Any], Positions]:
    """Returns the column's values at all rows' events, end to end, and the row of each value. Skips missing values."""
    _, rows = view.expanded()
    events_ = view.events_of_rows()
    if column.present is not None:
        has = column.present[events_]
        events_, rows = events_[has], rows[has]
    return column.values[events_], rows
