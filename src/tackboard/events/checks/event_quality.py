"""This module checks events.parquet, one row group at a time, and reports findings. findings.py has the rules."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.events.checks.findings import Findings
from tackboard.events.checks.measures import DAY_MS, IdCounts
from tackboard.events.checks.table_quality import KnownIds, TableCheck, integers, is_known, not_finite
from tackboard.events.schema import EVENT_COLUMNS, FIELD_KINDS, OPTIONAL_COLUMNS, encode, field_names, ids_of

EVENTS = "events.parquet"
MAX_HISTORY = 16_000
"""Largest number of events of one user that a model can read."""
NUM_NEIGHBOURS = 7
"""The neighbours of a day are this number of days before it and this number of days after it."""
SMALL_SHARE = 0.1
"""A day is a gap only if its number of events is below this share of the median over its neighbours."""
USUAL_SHARE = 0.5
"""A day is a gap only if some earlier day and some later day have at least this share of that median."""
USUAL_EVENTS = 50
"""A day is never a gap if that median is below this number of events."""
DAYS_NAMED = 5
MANY_USERS = 10
"""A heavy user has more than this many times the average number of events. If a log has at most this number of users,
nobody is a heavy user, because in a log of n users, nobody has more than n times the average."""


class EventCheck(TableCheck):
    """Checks the events of a snapshot. `users` and `items` count the events of each user and of each item."""

    def __init__(self, findings: Findings, known: KnownIds, *, now_ms: int) -> None:
        super().__init__(EVENTS, findings, {})
        self._known, self._now_ms = known, now_ms
        self._right: set[str] = set()
        self.users, self.items = IdCounts(), IdCounts()
        self._days: dict[int, int] = {}
        self._groups: list[tuple[int, int, int]] = []
        self._held: NDArray[np.int64] = np.zeros((0, 5), dtype=np.int64)
        self._actions: dict[str, int] = {}

    def _check(self, table: pa.Table) -> None:
        for name in (*EVENT_COLUMNS, "user_id", "item_id"):
            if name in table.column_names and table[name].null_count:
                self._note("null", table[name].is_null().to_numpy(), name)
        self._check_ids(table)
        self._check_ranges(table)
        if {"user_id", "time_ms", "order"} <= self._right:
            self._check_order(table, ("user_id", "time_ms", "order"), "user_id, time_ms and order")
        if {"user_id", "item_id", "time_ms", "action"} <= self._right:
            self._check_duplicates(table)
        if "user_id" in self._right:
            users, valid = integers(table["user_id"])
            self.users.add(users[valid])
            self._groups.append((self.num_rows, int(users[0]), int(users[-1])))
            self._check_known("unknown-user", table["user_id"], self._known.users)
        if "item_id" in self._right:
            self._check_items(table)

    def finish(self, max_user_share: float) -> None:
        """Checks the rules that need all events. Call this after the last row group."""
        counts = self.users.result()[1]
        if len(counts):
            share = counts.max() / counts.sum()
            if share > max(max_user_share, MANY_USERS / len(counts)):
                self._findings.add("heavy-user", EVENTS, f"{share:.1%}")
            if num_long := int((counts > MAX_HISTORY).sum()):
                self._findings.add("long-history", EVENTS, f"{MAX_HISTORY:,}", count=num_long)
        gaps = day_gaps(self._days)
        if gaps:
            days = np.array(gaps[:DAYS_NAMED], dtype="datetime64[D]").astype(str)
            more = f" and {len(gaps) - DAYS_NAMED} more" if len(gaps) > DAYS_NAMED else ""
            self._findings.add("day-gap", EVENTS, ", ".join(days) + more, count=len(gaps))

    def row_groups(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the first row, the first user and the last user of each row group, as three lists."""
        starts, firsts, lasts = zip(*self._groups, strict=True) if self._groups else ((), (), ())
        return list(starts), list(firsts), list(lasts)

    def begin(self, table: pa.Table) -> bool:
        """Checks the columns of `table`, which has no rows. Always returns True, because bad columns are skipped."""
        wanted = {**EVENT_COLUMNS, "user_id": (pa.int64(),), "item_id": (pa.int64(),)}
        fields = {name: tuple(FIELD_KINDS) for name in field_names(table)}
        for name, types in {**wanted, **OPTIONAL_COLUMNS, **fields}.items():
            if name not in table.column_names:
                if name in wanted:
                    self._findings.add("column-missing", EVENTS, name)
            elif table[name].type not in types:
                allowed = " or ".join(str(type_) for type_ in types)
                self._findings.add("column-type", EVENTS, f"{name} is {table[name].type}, allowed: {allowed}")
            else:
                self._right.add(name)
        return True

    def _check_ids(self, table: pa.Table) -> None:
        for kind in ("user", "item"):
            if not {kind, f"{kind}_id"} <= self._right or table[kind].null_count or table[f"{kind}_id"].null_count:
                continue
            try:
                right = ids_of(table[kind], kind)
            except DataError:  # Two names have the same hash, so the right ids are unknown.
                continue
            self._note("id-mismatch", right != integers(table[f"{kind}_id"])[0], f"{kind}_id")

    def _check_ranges(self, table: pa.Table) -> None:
        for name in ("time_ms", "received_ms"):
            if name in self._right:
                good = self._check_times(table, name, self._now_ms)
                if name == "time_ms":
                    days, counts = np.unique(good // DAY_MS, return_counts=True)
                    for day, count in zip(days.tolist(), counts.tolist(), strict=True):
                        self._days[day] = self._days.get(day, 0) + count
        if {"time_ms", "received_ms"} <= self._right:
            (time, valid), (received, also) = integers(table["time_ms"]), integers(table["received_ms"])
            self._note("received-early", (received < time) & valid & also)
        if "position" in self._right:
            self._check_positions(table)
        for name in field_names(table):
            if name in self._right and pa.types.is_floating(table[name].type):
                self._note("not-finite", not_finite(table[name]), name)

    def _check_duplicates(self, table: pa.Table) -> None:
        """Notes repeated events. Keeps the rows of the last user and time, which the next row group may repeat."""
        names = encode(table["action"].fill_null("") if table["action"].null_count else table["action"])
        codes = [self._actions.setdefault(name or "", len(self._actions)) for name in names.dictionary.to_pylist()]
        action = np.array(codes, dtype=np.int64)[names.indices.to_numpy()]
        row = np.arange(self.num_rows, self.num_rows + table.num_rows)
        columns = [integers(table[name])[0] for name in ("user_id", "time_ms", "item_id")]
        rows = np.concatenate([self._held, np.stack([*columns, action, row], axis=1)])
        same = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] == rows[:-1, 1])
        tied = rows[np.append(False, same) | np.append(same, False)]
        tied = tied[np.lexsort((tied[:, 4], tied[:, 3], tied[:, 2], tied[:, 1], tied[:, 0]))]
        repeats = tied[1:][(tied[1:, :4] == tied[:-1, :4]).all(axis=1)][:, 4]
        self._findings.add_rows("duplicate-event", EVENTS, np.sort(repeats[repeats >= self.num_rows]))
        last = (rows[:, 0] == rows[-1, 0]) & (rows[:, 1] == rows[-1, 1])
        self._held = rows[last]

    def _check_items(self, table: pa.Table) -> None:
        items, valid = integers(table["item_id"])
        self.items.add(items[valid])
        self._check_known("unknown-item", table["item_id"], self._known.items)
        known, births = self._known.items, self._known.births
        if known is not None and births is not None and len(births) and "time_ms" in self._right:
            place = np.clip(np.searchsorted(known, items), 0, len(known) - 1)
            early = is_known(items, known) & (integers(table["time_ms"])[0] < births[place])
            self._note("before-birth", early)


def day_gaps(days: dict[int, int]) -> list[int]:
    """Returns the gaps: days (since 1970) that have far fewer events than the days around them.

    A gap must have days with a usual number of events before it and after it. So a slow start or end is not a gap.
    """
    if len(days) < 2:
        return []
    first, last = min(days), max(days)
    counts = np.array([days.get(day, 0) for day in range(first, last + 1)])
    before, after = np.maximum.accumulate(counts), np.maximum.accumulate(counts[::-1])[::-1]
    gaps = []
    for place in range(1, len(counts) - 1):
        near = np.delete(
            counts[max(place - NUM_NEIGHBOURS, 0) : place + NUM_NEIGHBOURS + 1], min(place, NUM_NEIGHBOURS)
        )
        usual = float(np.median(near))
        is_between = min(before[place - 1], after[place + 1]) >= usual * USUAL_SHARE
        if usual >= USUAL_EVENTS and counts[place] < usual * SMALL_SHARE and is_between:
            gaps.append(first + place)
    return gaps
