"""This module checks the items, users, attribute versions, impressions and requests. findings.py has the rules."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.events.attributes import VALID_FROM
from tackboard.events.checks.findings import Findings
from tackboard.events.checks.measures import TOLERANCE_MS
from tackboard.events.dataset import LABEL
from tackboard.events.stored_tables import out_of_order

FIRST_MS = 631_152_000_000
"""This is 1990-01-01 UTC. An earlier time nearly always has a wrong unit."""
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class KnownIds:
    """The sorted ids of items and users, and the births of items (ms). A field is None if its file is unreadable.

    `births` is also None if items have no birth_ms. An unknown birth is stored as the smallest int64.
    """

    items: Ints | None
    users: Ints | None
    births: Ints | None


class TableCheck(abc.ABC):
    """Checks one file. `begin` gets the columns, then `look` gets the row groups in order.

    `columns` holds the columns to read (None means all). The caller sets `is_whole` once all row groups have been read.
    """

    columns: tuple[str, ...] | None = None

    def __init__(self, file: str, findings: Findings, wanted: Mapping[str, pa.DataType | None]) -> None:
        """Prepares the check. `wanted` gives the columns that must exist and their types (None means any type)."""
        self.file, self.is_whole, self.num_rows = file, False, 0
        self._findings, self._wanted = findings, wanted
        self._last: tuple[int, ...] | None = None

    def begin(self, table: pa.Table) -> bool:
        """Checks the columns of `table`, which has no rows. Returns False if the rows cannot be checked."""
        good = True
        for name, type_ in self._wanted.items():
            if name not in table.column_names:
                self._findings.add("column-missing", self.file, name)
                good = False
            elif type_ is not None and table[name].type != type_:
                self._findings.add("column-type", self.file, f"{name} is {table[name].type}, allowed: {type_}")
                good = False
        return good

    def look(self, table: pa.Table) -> None:
        """Checks the next row group, which has one row or more."""
        self._check(table)
        self.num_rows += table.num_rows

    @abc.abstractmethod
    def _check(self, table: pa.Table) -> None: ...

    def _note_rows(self, rule: str, rows: Ints, about: str = "") -> None:
        """Adds a finding about rows of the current row group. `rows` counts from 0 at the first row of the group."""
        self._findings.add_rows(rule, self.file, self.num_rows + rows, about)

    def _note(self, rule: str, wrong: Bools, about: str = "") -> None:
        self._note_rows(rule, np.flatnonzero(wrong), about)

    def _check_order(self, table: pa.Table, names: Sequence[str], about: str, *, strictly: bool = False) -> None:
        keys = [integers(table[name])[0] for name in names]
        self._note_rows("not-sorted", out_of_order(keys, self._last, strictly=strictly), about)
        self._last = tuple(int(key[-1]) for key in keys)

    def _check_known(self, rule: str, column: pa.ChunkedArray, known: Ints | None, *, nulls: bool = False) -> None:
        """Notes ids that are not in `known`. With `nulls`, a null counts as an unknown id."""
        if known is not None:
            ids, valid = integers(column)
            self._note(rule, (valid | nulls) & ~is_known(ids, known))

    def _check_times(self, table: pa.Table, name: str, now_ms: int) -> Ints:
        """Notes times before 1990 or more than a day after `now_ms`. Returns the other times."""
        times, valid = integers(table[name])
        good = (times >= FIRST_MS) & (times <= now_ms + TOLERANCE_MS)
        self._note("time-range", valid & ~good, name)
        return times[valid & good]

    def _check_positions(self, table: pa.Table) -> None:
        position, valid = integers(table["position"])
        self._note("position-range", (position < 0) & valid, "position")


class EntityCheck(TableCheck):
    """Checks items.parquet or users.parquet, which have one row per id, in order of the ids."""

    def __init__(self, kind: str, findings: Findings) -> None:
        super().__init__(f"{kind}s.parquet", findings, {f"{kind}_id": pa.int64(), "num_events": pa.int64()})
        self.columns = (kind, f"{kind}_id", "num_events", "birth_ms")
        self._id_name = f"{kind}_id"
        self._ids: list[Ints] = []
        self._counts: list[Ints] = []
        self._births: list[Ints] = []

    def _check(self, table: pa.Table) -> None:
        ids, valid = integers(table[self._id_name])
        self._note("null", ~valid, self._id_name)
        before = self._last
        self._check_order(table, [self._id_name], self._id_name)
        self._note("duplicate-id", np.diff(ids, prepend=before or ids[:1] - 1) == 0, self._id_name)
        self._ids.append(ids)
        self._counts.append(integers(table["num_events"])[0])
        if "birth_ms" in table.column_names and table["birth_ms"].type == pa.int64():
            births, known = integers(table["birth_ms"])
            self._births.append(np.where(known, births, np.iinfo(np.int64).min))

    def ids(self) -> Ints | None:
        """Returns the sorted ids, or None if part of the file could not be read."""
        return np.sort(_joined(self._ids)) if self.is_whole else None

    def births(self) -> Ints | None:
        """Returns birth_ms in the order of `ids`, or None if there is no birth_ms or part of the file is unreadable."""
        if not self.is_whole or not self._births:
            return None
        return _joined(self._births)[np.argsort(_joined(self._ids), kind="stable")]

    def compare_counts(self, counted: tuple[Ints, Ints]) -> None:
        """Compares num_events with `counted`: the ids in the events, sorted, and the number of events of each id."""
        if not self.is_whole:
            return
        ids, said = _joined(self._ids), _joined(self._counts)
        present, counts = counted
        place = np.clip(np.searchsorted(present, ids), 0, max(len(present) - 1, 0))
        right = np.where(present[place] == ids, counts[place], 0) if len(present) else np.zeros_like(said)
        self._findings.add_rows("count-mismatch", self.file, np.flatnonzero(said != right))


class HistoryCheck(TableCheck):
    """Checks a file of attribute versions of items or users (`kind`), sorted by id and valid_from_ms."""

    def __init__(self, kind: str, file: str, known: KnownIds, findings: Findings) -> None:
        super().__init__(file, findings, {f"{kind}_id": pa.int64(), VALID_FROM: pa.int64()})
        self._kind, self._known = kind, known.items if kind == "item" else known.users

    def _check(self, table: pa.Table) -> None:
        names = (f"{self._kind}_id", VALID_FROM)
        self._check_order(table, names, f"{' and '.join(names)} (each pair at most once)", strictly=True)
        self._check_known(f"unknown-{self._kind}", table[names[0]], self._known, nulls=True)


class ImpressionCheck(TableCheck):
    """Checks impressions.parquet, which holds the items that each request showed."""

    def __init__(self, known: KnownIds, findings: Findings) -> None:
        super().__init__("impressions.parquet", findings, {"request": None, "item_id": pa.int64()})
        self._known = known

    def _check(self, table: pa.Table) -> None:
        self._check_known("unknown-item", table["item_id"], self._known.items)
        if "user_id" in table.column_names:
            self._check_known("unseen-user", table["user_id"], self._known.users)
        if "position" in table.column_names and pa.types.is_integer(table["position"].type):
            self._check_positions(table)


class RequestCheck(TableCheck):
    """Checks requests.parquet, which has one row per request. All lists of a row have one value per candidate."""

    def __init__(self, known: KnownIds, findings: Findings, now_ms: int) -> None:
        wanted = {"request": None, "user_id": pa.int64(), "time_ms": pa.int64(), "item_id": pa.list_(pa.int64())}
        super().__init__("requests.parquet", findings, wanted)
        self._known, self._now_ms = known, now_ms

    def _check(self, table: pa.Table) -> None:
        self._check_order(table, ("user_id", "time_ms"), "user_id and time_ms")
        self._check_times(table, "time_ms", self._now_ms)
        self._check_known("unseen-user", table["user_id"], self._known.users, nulls=True)
        for name in table.column_names:
            if pa.types.is_list(table[name].type):
                self._check_list(table, name)

    def _check_list(self, table: pa.Table, name: str) -> None:
        lengths = integers(pc.list_value_length(table[name]))[0]
        wanted = integers(pc.list_value_length(table["item_id"]))[0]
        self._note("list-lengths", lengths != wanted, f"item_id and {name}")
        flat = pc.list_flatten(table[name])
        if name == "item_id" and self._known.items is not None:
            items, valid = integers(flat)
            self._note_values("unknown-item", lengths, valid & ~is_known(items, self._known.items))
        elif name == "position":
            values, valid = integers(flat)
            self._note_values("position-range", lengths, (values < 0) & valid, name)
        elif pa.types.is_floating(flat.type):
            self._note_values("not-finite", lengths, not_finite(flat), name)
        elif name.startswith(LABEL):
            values, valid = integers(flat)
            self._note_values("label-value", lengths, valid & (values != 0) & (values != 1), name)

    def _note_values(self, rule: str, lengths: Ints, wrong: Bools, about: str = "") -> None:
        """Adds a finding about values in lists. `wrong` marks the bad values. `lengths` has the length of each list."""
        rows = np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))
        self._note_rows(rule, np.unique(rows[wrong]), about)


def integers(column: pa.ChunkedArray | pa.Array) -> tuple[Ints, Bools]:
    """Returns a column of integers, with 0 for nulls, and a mask of the rows that are not null."""
    if isinstance(column, pa.Array):
        column = pa.chunked_array([column])
    valid = column.is_valid().to_numpy() if column.null_count else np.ones(len(column), dtype=bool)
    return np.asarray(column.fill_null(0).to_numpy(), dtype=np.int64), valid


def not_finite(column: pa.ChunkedArray | pa.Array) -> Bools:
    """Returns a mask of the numbers that are NaN or infinite. The mask is False for nulls."""
    wrong = pc.invert(pc.is_finite(column)).fill_null(False)
    return np.asarray(wrong.to_numpy() if isinstance(wrong, pa.ChunkedArray) else wrong.to_numpy(zero_copy_only=False))


def is_known(ids: Ints, known: Ints) -> Bools:
    """Returns a mask of the `ids` that are in `known`. `known` is sorted."""
    if not len(known):
        return np.zeros(len(ids), dtype=bool)
    found = known[np.clip(np.searchsorted(known, ids), 0, len(known) - 1)]
    return np.asarray(found == ids)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
