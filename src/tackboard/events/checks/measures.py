"""This module reads measures of events (such as the action or the hour) bucket by bucket, and counts their values.

`data stats` and `data drift` both use this module, so a gap or an hour means the same in both commands. Both need
memory for one bucket (a group of users), and for one count per item and per user. Samples and counts of names are
limited in size.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.core.hashing import mix64
from tackboard.events.dataset import Dataset
from tackboard.events.schema import encode, numpy_column, starts_of_users

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
TOLERANCE_MS = DAY_MS
"""A time up to this far in the future is accepted, because some clocks run fast and some logs mix up time zones."""
SAMPLE_SIZE = 65_536
MAX_NAMES = 100_000
"""If a column has more distinct names than this, only the MAX_NAMES // 2 most frequent names are kept."""
MERGE_AT = 1 << 22
"""When more ids than this have been collected, they are merged into the counts."""
MISSING = "(missing)"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_DAY = r"(\d{4}-\d\d-\d\d)?"
_RANGE = re.compile(rf"{_DAY}\.\.{_DAY}")


@dataclasses.dataclass(frozen=True)
class Slice:
    """The events of a dataset whose time lies in [from_ms, until_ms). A bound of None means no bound."""

    dataset: Dataset
    from_ms: int | None = None
    until_ms: int | None = None

    def chunks(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields user_id, time_ms and `columns`, one bucket at a time. Skips buckets without events in the range."""
        for table in self.dataset.event_chunks(list(dict.fromkeys(["time_ms", *columns]))):
            times = numpy_column(table, "time_ms")
            kept = np.ones(len(times), dtype=bool)
            if self.from_ms is not None:
                kept &= times >= self.from_ms
            if self.until_ms is not None:
                kept &= times < self.until_ms
            table = table if kept.all() else table.filter(pa.array(kept))
            if table.num_rows:
                yield table


def parse_range(text: str | None) -> tuple[int | None, int | None]:
    """Parses days `2026-01-01..2026-01-31` to [from, until) in ms UTC, last day included. A bound may be left out."""
    if text is None:
        return None, None
    found = _RANGE.fullmatch(text.strip())
    try:
        days = [None if not day else datetime.date.fromisoformat(day) for day in found.groups()] if found else []
    except ValueError:
        days = []
    if not days or days == [None, None]:
        raise UsageError(
            f"cannot read the range {text!r}",
            allowed="allowed: days of UTC, e.g. 2026-01-01..2026-01-31 or 2026-02-01..",
        )
    first, last = (None if day is None else (day - datetime.date(1970, 1, 1)).days for day in days)
    if first is not None and last is not None and last < first:
        raise UsageError(f"the range {text!r} ends before it begins")
    return None if first is None else first * DAY_MS, None if last is None else (last + 1) * DAY_MS


def columns_of(dataset: Dataset) -> list[str]:
    """Returns the columns of events.parquet that the measures read."""
    return ["time_ms", "received_ms", "action", "surface", "item_id", *dataset.fields]


def name_columns(dataset: Dataset) -> list[str]:
    """Returns the measures whose values are names: action, surface, hour of day, and fields of text and booleans."""
    return ["action", "surface", "hour", *(name for name, kind in dataset.fields.items() if kind in ("string", "bool"))]


def number_columns(dataset: Dataset) -> list[str]:
    """Returns the measures whose values are numbers: gap_s, lateness_s, events_per_user, and the fields of numbers."""
    numeric = (name for name, kind in dataset.fields.items() if kind in ("int", "float"))
    return ["gap_s", "lateness_s", "events_per_user", *numeric]


def names_in(table: pa.Table, name: str) -> dict[str, int]:
    """Counts how many events of a table have each name. The measure `hour` is the hour of the day in UTC."""
    if name == "hour":
        counts = np.bincount(hours_in(table), minlength=24)
        return {f"{hour:02d}": int(count) for hour, count in enumerate(counts) if count}
    array = encode(table[name])
    counts = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(array.dictionary))
    found = {str(text): int(count) for text, count in zip(array.dictionary.to_pylist(), counts, strict=True) if count}
    if missing := array.indices.null_count:
        found[MISSING] = found.get(MISSING, 0) + missing
    return found


def numbers_in(table: pa.Table, name: str) -> Floats:
    """Returns a measure's values in a table, with NaN for missing and infinite values. Times are in seconds."""
    if name == "gap_s":
        users, times = numpy_column(table, "user_id"), numpy_column(table, "time_ms")
        return np.asarray(np.diff(times)[users[1:] == users[:-1]] / 1000.0)
    if name == "lateness_s":
        return np.asarray((numpy_column(table, "received_ms") - numpy_column(table, "time_ms")) / 1000.0)
    if name == "events_per_user":
        return user_counts_in(table).astype(np.float64)
    values = np.asarray(table[name].cast(pa.float64()).fill_null(np.nan).to_numpy(), dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def user_counts_in(table: pa.Table) -> Ints:
    """Returns the number of events of each user, in the order of the users in the table."""
    users = numpy_column(table, "user_id")
    return np.diff(np.append(starts_of_users(users), len(users)))


def hours_in(table: pa.Table) -> Ints:
    """Returns the hour of the day, UTC, of each event."""
    return np.asarray(numpy_column(table, "time_ms") % DAY_MS // HOUR_MS)


class Sample:
    """A uniform sample of at most `SAMPLE_SIZE` of the added values. The same values always give the same sample."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._limit = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
        self._values: Floats = np.zeros(0)
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def add(self, values: Floats) -> None:
        """Adds values. NaN is left out."""
        values = values[~np.isnan(values)]
        keys = mix64(np.arange(self.num_seen, self.num_seen + len(values)), 1) if len(values) else self._keys[:0]
        self.num_seen += len(values)
        drawn = keys <= self._limit
        self._values = np.concatenate([self._values, values[drawn]])
        self._keys = np.concatenate([self._keys, keys[drawn]])
        while len(self._values) > SAMPLE_SIZE:
            self._limit >>= np.uint64(1)
            drawn = self._keys <= self._limit
            self._values, self._keys = self._values[drawn], self._keys[drawn]

    @property
    def is_whole(self) -> bool:
        """Whether the sample holds every added value."""
        return len(self._values) == self.num_seen

    def quantiles(self, shares: Sequence[float]) -> Floats:
        """Returns quantiles of the sample, or an empty array if the sample is empty."""
        return np.quantile(self._values, shares) if len(self._values) else np.zeros(0)


class NameCounts:
    """Counts names. The counts are exact for up to `MAX_NAMES` distinct names. Beyond this, the rarest are dropped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, counts: dict[str, int]) -> None:
        self.counts.update(counts)
        if len(self.counts) > MAX_NAMES:
            self.counts = Counter(dict(self.counts.most_common(MAX_NAMES // 2)))

    def top(self, number: int) -> list[str]:
        """Returns the `number` most frequent names. Names with the same count are sorted by name."""
        return sorted(self.counts, key=lambda name: (-self.counts[name], name))[:number]


class IdCounts:
    """Keeps one count per int64 id."""

    def __init__(self) -> None:
        self._ids: list[Ints] = []
        self._counts: list[Ints] = []
        self._waiting = 0

    def add(self, ids: Ints) -> None:
        """Adds one to the count of an id each time that it occurs in `ids`."""
        unique, counts = np.unique(ids, return_counts=True)
        self._ids.append(unique)
        self._counts.append(counts)
        self._waiting += len(unique)
        if self._waiting > MERGE_AT:
            self._merge()

    def result(self) -> tuple[Ints, Ints]:
        """Returns the ids, sorted, and the number of times that each was added."""
        self._merge()
        return self._ids[0], self._counts[0]

    def _merge(self) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        ids, place = np.unique(np.concatenate([nothing, *self._ids]), return_inverse=True)
        counts = np.zeros(len(ids), dtype=np.int64)
        np.add.at(counts, place, np.concatenate([nothing, *self._counts]))
        self._ids, self._counts, self._waiting = [ids], [counts], 0


def newest_time(dataset: Dataset, column: str, *, now_ms: int | None = None) -> tuple[int, int]:
    """Returns the newest time in `column` that is not in the future, and the number of events in the future.

    The future begins a day after `now_ms` (by default the clock's time). Raises DataError if every time is in the
    future.
    """
    last = (int(time.time() * 1000) if now_ms is None else now_ms) + TOLERANCE_MS
    newest, num_future = -1, 0
    for table in dataset.event_chunks([column]):
        times = numpy_column(table, column)
        past = times <= last
        num_future += int((~past).sum())
        newest = max(newest, int(times[past].max(initial=-1)))
    if newest < 0:
        raise DataError(
            f"every {column} of {dataset.path} lies in the future",
            fix="check this machine's clock and the unit of the log's times",
        )
    return newest, num_future
