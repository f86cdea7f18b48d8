"""The rules of events.parquet: row groups in order in, findings out. See findings.py for the rules."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.events.checks.findings import Findings
from tackboard.events.checks.measures import DAY_MS, IdCounts
from tackboard.events.checks.table_quality import KnownIds, check_times, integers, is_known
from tackboard.events.schema import EVENT_COLUMNS, FIELD_KINDS, OPTIONAL_COLUMNS, encode, field_names, ids_of
from tackboard.events.stored_tables import out_of_order

EVENTS = "events.parquet"
MAX_HISTORY = 16_000
"""Events of a user that are read at most."""
NUM_NEIGHBOURS = 7
"""Days on each side that a day is compared with."""
SMALL_SHARE = 0.1
"""A day with fewer events than this share of its neighbours' median is a gap."""
USUAL_SHARE = 0.5
"""A day with at least this share of it is a usual one."""
USUAL_EVENTS = 50
"""Where the usual day has fewer events than this, an empty one is no surprise."""
DAYS_NAMED = 5
MANY_USERS = 10
"""A user is heavy only with so many times the events of the average user: in a small log everyone has a large share."""
Counts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids, sorted, and how many events each has."""


class EventCheck:
    """Looks at the events of a snapshot. `is_whole`: all of them could be read."""

    columns: tuple[str, ...] | None = None

    def __init__(self, findings: Findings, known: KnownIds, *, now_ms: int) -> None:
        self.is_whole = False
        self.num_rows = 0
        self._findings, self._known, self._now_ms = findings, known, now_ms
        self._right: set[str] = set()
        self._users, self._items = IdCounts(), IdCounts()
        self._days: dict[int, int] = {}
        self._groups: list[tuple[int, int, int]] = []
        self._last: tuple[int, ...] | None = None
        self._held: NDArray[np.int64] = np.zeros((0, 5), dtype=np.int64)
        self._actions: dict[str, int] = {}

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group."""
        self.num_rows += table.num_rows
        self._check_nulls(table, first_row)
        self._check_ids(table, first_row)
        self._check_ranges(table, first_row)
        if {"user_id", "time_ms", "order"} <= self._right:
            self._check_order(table, first_row)
        if {"user_id", "item_id", "time_ms", "action"} <= self._right:
            self._check_duplicates(table, first_row)
        if "user_id" in self._right:
            self._count_users(table, first_row)
        if "item_id" in self._right:
            self._check_items(table, first_row)

    def finish(self, max_user_share: float) -> None:
        """The rules about all events together."""
        counts = self.user_counts()[1]
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

    def user_counts(self) -> Counts:
        """Every user that occurs, and their events."""
        return self._users.result()

    def item_counts(self) -> Counts:
        """Every item that occurs, and its events."""
        return self._items.result()

    def row_groups(self) -> tuple[list[int], list[int], list[int]]:
        """First row, first user and last user of each row group."""
        starts, firsts, lasts = zip(*self._groups, strict=True) if self._groups else ((), (), ())
        return list(starts), list(firsts), list(lasts)

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows. Columns that are as they should be are looked at in any case."""
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

    def _check_nulls(self, table: pa.Table, first_row: int) -> None:
        for name in (*EVENT_COLUMNS, "user_id", "item_id"):
            if name in table.column_names and table[name].null_count:
                rows = np.flatnonzero(table[name].is_null().to_numpy())
                self._findings.add_rows("null", EVENTS, first_row + rows, name)

    def _check_ids(self, table: pa.Table, first_row: int) -> None:
        for kind in ("user", "item"):
            if not {kind, f"{kind}_id"} <= self._right or table[kind].null_count or table[f"{kind}_id"].null_count:
                continue
            try:
                right = ids_of(table[kind], kind)
            except DataError:  # Two names with one id: neither can be told.
                continue
            wrong = np.flatnonzero(right != integers(table, f"{kind}_id")[0])
            self._findings.add_rows("id-mismatch", EVENTS, first_row + wrong, f"{kind}_id")

    def _check_ranges(self, table: pa.Table, first_row: int) -> None:
        for name in ("time_ms", "received_ms"):
            if name in self._right:
                good = check_times(table, name, first_row, EVENTS, self._now_ms, self._findings)
                if name == "time_ms":
                    days, counts = np.unique(good // DAY_MS, return_counts=True)
                    for day, count in zip(days.tolist(), counts.tolist(), strict=True):
                        self._days[day] = self._days.get(day, 0) + count
        if {"time_ms", "received_ms"} <= self._right:
            (time, valid), (received, also) = integers(table, "time_ms"), integers(table, "received_ms")
            early = np.flatnonzero((received < time) & valid & also)
            self._findings.add_rows("received-early", EVENTS, first_row + early)
        if "position" in self._right:
            position, valid = integers(table, "position")
            self._findings.add_rows(
                "position-range", EVENTS, first_row + np.flatnonzero((position < 0) & valid), "position"
            )
        for name in field_names(table):
            if name in self._right and pa.types.is_floating(table[name].type):
                infinite = pc.invert(pc.is_finite(table[name])).fill_null(False).to_numpy()
                self._findings.add_rows("not-finite", EVENTS, first_row + np.flatnonzero(infinite), name)

    def _check_order(self, table: pa.Table, first_row: int) -> None:
        keys = [integers(table, name)[0] for name in ("user_id", "time_ms", "order")]
        rows = out_of_order(keys, self._last)
        self._findings.add_rows("not-sorted", EVENTS, first_row + rows, "user_id, time_ms and order")
        self._last = tuple(int(key[-1]) for key in keys)

    def _check_duplicates(self, table: pa.Table, first_row: int) -> None:
        """Same user, item, action and time. Rows that could repeat one of the next row group are held until then."""
        names = encode(table["action"].fill_null("") if table["action"].null_count else table["action"])
        codes = [self._actions.setdefault(name or "", len(self._actions)) for name in names.dictionary.to_pylist()]
        action = np.array(codes, dtype=np.int64)[names.indices.to_numpy()]
        row = np.arange(first_row, first_row + table.num_rows)
        columns = [integers(table, name)[0] for name in ("user_id", "time_ms", "item_id")]
        rows = np.concatenate([self._held, np.stack([*columns, action, row], axis=1)])
        same = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] == rows[:-1, 1])
        tied = rows[np.append(False, same) | np.append(same, False)]
        tied = tied[np.lexsort((tied[:, 4], tied[:, 3], tied[:, 2], tied[:, 1], tied[:, 0]))]
        repeats = tied[1:][(tied[1:, :4] == tied[:-1, :4]).all(axis=1)][:, 4]
        self._findings.add_rows("duplicate-event", EVENTS, np.sort(repeats[repeats >= first_row]))
        last = (rows[:, 0] == rows[-1, 0]) & (rows[:, 1] == rows[-1, 1])
        self._held = rows[last]

    def _count_users(self, table: pa.Table, first_row: int) -> None:
        users, valid = integers(table, "user_id")
        self._users.add(users[valid])
        self._groups.append((first_row, int(users[0]), int(users[-1])))
        if self._known.users is not None:
            unknown = np.flatnonzero(valid & ~is_known(users, self._known.users))
            self._findings.add_rows("unknown-user", EVENTS, first_row + unknown)

    def _check_items(self, table: pa.Table, first_row: int) -> None:
        items, valid = integers(table, "item_id")
        self._items.add(items[valid])
        if self._known.items is None:
            return
        listed = is_known(items, self._known.items)
        self._findings.add_rows("unknown-item", EVENTS, first_row + np.flatnonzero(valid & ~listed))
        if self._known.births is not None and len(self._known.births) and "time_ms" in self._right:
            place = np.clip(np.searchsorted(self._known.items, items), 0, len(self._known.items) - 1)
            early = listed & (integers(table, "time_ms")[0] < self._known.births[place])
            self._findings.add_rows("before-birth", EVENTS, first_row + np.flatnonzero(early))


def day_gaps(days: dict[int, int]) -> list[int]:
    """Days (since 1970) with far fewer events than the days around them, between days of a usual number.

    A log that begins or ends thinly has no gap there.
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
