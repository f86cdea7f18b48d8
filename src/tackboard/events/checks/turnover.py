"""This module measures how often users repeat items, how long items live, and how fast the catalogue turns over.

It takes a dataset and returns whole numbers, from which `advice.py` chooses settings. One pass reads users, items and
times of the events, one bucket (a group of users) at a time. Memory grows with the number of items and with one bucket,
not with the number of events.

        first event                                       start of the last tenth      last event
            ├────────── nine tenths of the events ──────────────┤├── one tenth ──┤

Decided: the start of the last tenth is an edge of one of NUM_BINS equal parts of the log's span, so the last tenth may
hold a little more than a tenth of the events. The age of an item is the time since its first event in the log, because
a log does not say when an item older than the log appeared. So an age limit, such as a day, is used only if the log was
at least this old when its last tenth began.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tackboard.core.hashing import mix64
from tackboard.events.checks.measures import DAY_MS, HOUR_MS, Sample
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column, starts_of_users
from tackboard.events.statistics import count_repeats

LAST_SHARE = 0.1
"""The last part of the log that is compared with the rest: this share of the events, in order of time."""
NUM_BINS = 65_536
HORIZONS_MS = (HOUR_MS, DAY_MS, 7 * DAY_MS)
"""Ages at which events are counted: an hour, a day, a week."""
MIN_EVENTS_OF_ITEM = 10
"""The time until an item has had half of its events is measured for items with at least this many events."""
MAX_SAMPLED_EVENTS = 1 << 20
"""This time is measured for a sample of items that have at most this many events together."""
NEVER_MS = np.iinfo(np.int64).max
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turnover:
    """The measures of a log. Counts are exact; the two medians are exact unless the log is larger than the samples."""

    num_events: int
    num_users: int
    num_items: int
    """Number of items with events."""
    span_ms: int
    """Time from the first to the last event."""
    num_repeats: int
    """Events on an item that the same user had before."""
    num_immediate_repeats: int
    """Events on the same item as the user's previous event."""
    median_age_ms: int
    """Median over the events of the age of the event's item."""
    half_life_ms: int | None
    """Median over the items with at least MIN_EVENTS_OF_ITEM events of the time until an item has had half of its
    events. None if there is no such item."""
    before_ms: int
    """Time from the first event to the start of the last tenth."""
    num_last: int
    """Events of the last tenth."""
    num_last_new: int
    """Events of the last tenth on items that first appeared in it."""
    num_last_by_chance: int
    """What `num_last_new` would be if the same events came in random order. Rare items make this number large."""
    num_last_under_hour: int
    """Events of the last tenth on items younger than an hour. A model that was trained an hour before such an event has
    never seen its item."""
    num_last_under_day: int
    num_last_under_week: int
    num_users_last: int
    """Users with an event in the last tenth."""
    num_users_across: int
    """Users with an event in the last tenth and an event before it."""

    @property
    def repeat_share(self) -> float:
        return self.num_repeats / max(1, self.num_events)

    @property
    def new_share(self) -> float:
        """Share of the last tenth's events that fall on items that first appeared in it."""
        return self.num_last_new / max(1, self.num_last)

    @property
    def chance_share(self) -> float:
        """What `new_share` would be if the same events came in random order."""
        return self.num_last_by_chance / max(1, self.num_last)

    def younger_share(self, horizon_ms: int) -> float | None:
        """Returns the share of the last tenth's events on items younger than one of HORIZONS_MS.

        Returns None if the log had run for less than this time when its last tenth began.
        """
        counts = (self.num_last_under_hour, self.num_last_under_day, self.num_last_under_week)
        is_known = self.before_ms >= horizon_ms and self.num_last
        return counts[HORIZONS_MS.index(horizon_ms)] / self.num_last if is_known else None


def measure_turnover(dataset: Dataset) -> Turnover:
    """Reads the users, items and times of all events once. The dataset must have at least one event."""
    items = dataset.read_items(["item_id", "num_events", "first_ms"])
    catalogue, counts = numpy_column(items, "item_id"), numpy_column(items, "num_events")
    births = np.asarray(items["first_ms"].fill_null(NEVER_MS).to_numpy())
    first_ms, last_ms = int(dataset.statistics["first_ms"]), int(dataset.statistics["last_ms"])
    times = _TimeCounts(first_ms, last_ms)
    halves = _HalfLives(catalogue, counts)
    ages = Sample()
    num_events, num_users, repeats = 0, 0, np.zeros(2, dtype=np.int64)
    for table in dataset.event_chunks(["item_id", "time_ms"]):
        if not table.num_rows:
            continue
        users, event_times = numpy_column(table, "user_id"), numpy_column(table, "time_ms")
        places = dataset.places_of_items(catalogue, numpy_column(table, "item_id"))
        event_ages = np.maximum(event_times - births[places], 0)
        starts = starts_of_users(users)
        num_events, num_users = num_events + len(users), num_users + len(starts)
        per_user, same_user = np.diff(np.append(starts, len(users))), users[1:] == users[:-1]
        repeats += count_repeats(per_user, places, same_user, catalogue)
        ages.add(event_ages.astype(np.float64))
        halves.add(places, event_ages)
        times.add(event_times, event_ages, starts)
    start = times.start_of_last()
    num_last = int(times.per_bin[start:].sum())
    chance = num_last / max(1, num_events)
    is_new = births >= times.edge_ms(start)
    under_hour, under_day, under_week = np.cumsum(times.per_age[start:].sum(axis=0))[: len(HORIZONS_MS)].tolist()
    return Turnover(
        num_events=num_events,
        num_users=num_users,
        num_items=int((counts > 0).sum()),
        span_ms=last_ms - first_ms,
        num_repeats=int(repeats[0]),
        num_immediate_repeats=int(repeats[1]),
        median_age_ms=int(ages.quantiles([0.5])[0]) if ages.num_seen else 0,
        half_life_ms=halves.median_ms(),
        before_ms=times.edge_ms(start) - first_ms,
        num_last=num_last,
        num_last_new=int(counts[is_new & (counts > 0)].sum()),
        num_last_by_chance=round(float(counts @ np.power(chance, counts))),
        num_last_under_hour=under_hour,
        num_last_under_day=under_day,
        num_last_under_week=under_week,
        num_users_last=num_users - int(times.last_bins[:start].sum()),
        num_users_across=int(times.first_bins[:start].sum() - times.last_bins[:start].sum()),
    )


class _TimeCounts:
    """Counts events by time and by the age of their item, and users by the times of their first and last event."""

    def __init__(self, first_ms: int, last_ms: int) -> None:
        self._first_ms = first_ms
        self._width_ms = (last_ms - first_ms) // NUM_BINS + 1
        self.per_age = np.zeros((NUM_BINS, len(HORIZONS_MS) + 1), dtype=np.int64)
        self.first_bins = np.zeros(NUM_BINS, dtype=np.int64)
        self.last_bins = np.zeros(NUM_BINS, dtype=np.int64)

    @property
    def per_bin(self) -> Ints:
        return np.asarray(self.per_age.sum(axis=1))

    def add(self, times: Ints, ages: Ints, starts: Ints) -> None:
        """Adds the events of one bucket. `starts` holds the index of each user's first event."""
        bins = np.clip((times - self._first_ms) // self._width_ms, 0, NUM_BINS - 1)
        classes = np.searchsorted(HORIZONS_MS, ages, side="right")
        num_classes = self.per_age.shape[1]
        self.per_age += np.bincount(bins * num_classes + classes, minlength=self.per_age.size).reshape(-1, num_classes)
        ends = np.append(starts[1:], len(times)) - 1
        self.first_bins += np.bincount(bins[starts], minlength=NUM_BINS)
        self.last_bins += np.bincount(bins[ends], minlength=NUM_BINS)

    def start_of_last(self) -> int:
        """Returns the bin at which the last tenth begins: the latest bin with a tenth of the events in or after it."""
        from_bin = np.cumsum(self.per_bin[::-1])[::-1]
        return int(np.flatnonzero(from_bin >= LAST_SHARE * from_bin[0])[-1])

    def edge_ms(self, number: int) -> int:
        """Returns the time at which a bin begins."""
        return self._first_ms + number * self._width_ms


class _HalfLives:
    """Keeps the ages of all events of a sample of the items."""

    def __init__(self, catalogue: Ints, counts: Ints) -> None:
        places = np.flatnonzero(counts >= MIN_EVENTS_OF_ITEM)
        places = places[np.argsort(mix64(catalogue[places], 1))] if len(places) else places
        sampled = places[np.cumsum(counts[places]) <= MAX_SAMPLED_EVENTS]
        self._is_sampled = np.zeros(len(catalogue), dtype=bool)
        self._is_sampled[sampled] = True
        self._places: list[Ints] = []
        self._ages: list[Ints] = []

    def add(self, places: Ints, ages: Ints) -> None:
        """Adds events. `places` are the positions of their items in the catalogue."""
        kept = self._is_sampled[places]
        self._places.append(places[kept])
        self._ages.append(ages[kept])

    def median_ms(self) -> int | None:
        """Returns the median over the sampled items of the time until an item has had half of its events."""
        if not self._is_sampled.any():
            return None
        places, ages = np.concatenate(self._places), np.concatenate(self._ages)
        order = np.lexsort((ages, places))
        places, ages = places[order], ages[order]
        starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
        counts = np.diff(np.append(starts, len(places)))
        return int(np.median(ages[starts + (counts - 1) // 2]))
