"""The rules of a snapshot's other files: items, users, their histories, impressions and requests. See findings.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.events.checks.findings import Findings
from tackboard.events.checks.measures import TOLERANCE_MS
from tackboard.events.dataset import LABEL
from tackboard.events.entities import VALID_FROM
from tackboard.events.stored_tables import out_of_order

FIRST_MS = 631_152_000_000
"""1990-01-01: an earlier time is nearly always a wrong unit."""
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class KnownIds:
    """Ids of items and users, sorted, None where their file cannot be read; births in ms, the least int64 if none."""

    items: Ints | None
    users: Ints | None
    births: Ints | None


class TableCheck(Protocol):
    """What looks at one file. `columns` are those it reads (None: all); `is_whole` is set once all of it was read."""

    columns: tuple[str, ...] | None
    is_whole: bool

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows; False where the rows cannot be looked at."""

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group, and the number of its first row."""


class EntityCheck:
    """items.parquet or users.parquet: one row per id, in order."""

    def __init__(self, kind: str, findings: Findings) -> None:
        self.kind, self.file = kind, f"{kind}s.parquet"
        self.columns: tuple[str, ...] | None = (kind, f"{kind}_id", "num_events", "birth_ms")
        self.is_whole = False
        self._findings = findings
        self._ids: list[Ints] = []
        self._counts: list[Ints] = []
        self._births: list[Ints] = []

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows; False where the rows cannot be looked at."""
        wanted = {f"{self.kind}_id": pa.int64(), "num_events": pa.int64()}
        return _require(table, wanted, self.file, self._findings)

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group."""
        id_name = f"{self.kind}_id"
        ids, valid = integers(table, id_name)
        self._findings.add_rows("null", self.file, first_row + np.flatnonzero(~valid), id_name)
        before = () if not self._ids else (int(self._ids[-1][-1]),)
        self._findings.add_rows("not-sorted", self.file, first_row + out_of_order([ids], before or None), id_name)
        repeated = np.flatnonzero(np.diff(ids, prepend=before or ids[:1] - 1) == 0)
        self._findings.add_rows("duplicate-id", self.file, first_row + repeated, id_name)
        self._ids.append(ids)
        self._counts.append(integers(table, "num_events")[0])
        if "birth_ms" in table.column_names and table["birth_ms"].type == pa.int64():
            births, known = integers(table, "birth_ms")
            self._births.append(np.where(known, births, np.iinfo(np.int64).min))

    def ids(self) -> Ints | None:
        """The ids, sorted; None where the file could not be read to its end."""
        return np.sort(_joined(self._ids)) if self.is_whole else None

    def births(self) -> Ints | None:
        """birth_ms by the order of `ids`; None where there are none."""
        if not self.is_whole or not self._births:
            return None
        return _joined(self._births)[np.argsort(_joined(self._ids), kind="stable")]

    def compare_counts(self, counted: tuple[Ints, Ints]) -> None:
        """num_events against what the events hold."""
        if not self.is_whole:
            return
        ids, said = _joined(self._ids), _joined(self._counts)
        present, counts = counted
        place = np.clip(np.searchsorted(present, ids), 0, max(len(present) - 1, 0))
        right = np.where(present[place] == ids, counts[place], 0) if len(present) else np.zeros_like(said)
        self._findings.add_rows("count-mismatch", self.file, np.flatnonzero(said != right))


class HistoryCheck:
    """item_history.parquet or user_history.parquet: versions by id and valid_from_ms."""

    columns: tuple[str, ...] | None = None

    def __init__(self, kind: str, known: KnownIds, findings: Findings) -> None:
        self.kind, self.file = kind, f"{kind}_history.parquet"
        self.is_whole = False
        self._known = known.items if kind == "item" else known.users
        self._findings = findings
        self._last: tuple[int, ...] | None = None

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows; False where the rows cannot be looked at."""
        return _require(table, {f"{self.kind}_id": pa.int64(), VALID_FROM: pa.int64()}, self.file, self._findings)

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group."""
        id_name = f"{self.kind}_id"
        ids, since = integers(table, id_name)[0], integers(table, VALID_FROM)[0]
        rows = out_of_order([ids, since], self._last, strictly=True)
        self._findings.add_rows(
            "not-sorted", self.file, first_row + rows, f"{id_name} and {VALID_FROM}, each pair once"
        )
        self._last = (int(ids[-1]), int(since[-1]))
        if self._known is not None:
            unknown = np.flatnonzero(~is_known(ids, self._known))
            self._findings.add_rows(f"unknown-{self.kind}", self.file, first_row + unknown)


class ImpressionCheck:
    """impressions.parquet: what each request showed."""

    columns: tuple[str, ...] | None = None
    file = "impressions.parquet"

    def __init__(self, known: KnownIds, findings: Findings) -> None:
        self.is_whole = False
        self._known, self._findings = known, findings

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows; False where the rows cannot be looked at."""
        return _require(table, {"request": None, "item_id": pa.int64()}, self.file, self._findings)

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group."""
        for kind, ids, rule in (
            ("item", self._known.items, "unknown-item"),
            ("user", self._known.users, "unseen-user"),
        ):
            if ids is not None and f"{kind}_id" in table.column_names:
                values, valid = integers(table, f"{kind}_id")
                self._findings.add_rows(rule, self.file, first_row + np.flatnonzero(valid & ~is_known(values, ids)))
        if "position" in table.column_names and pa.types.is_integer(table["position"].type):
            position, valid = integers(table, "position")
            wrong = np.flatnonzero((position < 0) & valid)
            self._findings.add_rows("position-range", self.file, first_row + wrong, "position")


class RequestCheck:
    """requests.parquet: one row per request, its candidates in lists of one length."""

    columns: tuple[str, ...] | None = None
    file = "requests.parquet"

    def __init__(self, known: KnownIds, findings: Findings, now_ms: int) -> None:
        self.is_whole = False
        self._known, self._findings, self._now_ms = known, findings, now_ms
        self._last: tuple[int, ...] | None = None

    def begin(self, table: pa.Table) -> bool:
        """The columns, told by a table without rows; False where the rows cannot be looked at."""
        wanted = {"request": None, "user_id": pa.int64(), "time_ms": pa.int64(), "item_id": pa.list_(pa.int64())}
        return _require(table, wanted, self.file, self._findings)

    def look(self, table: pa.Table, first_row: int) -> None:
        """The next row group."""
        users, times = integers(table, "user_id")[0], integers(table, "time_ms")[0]
        self._findings.add_rows(
            "not-sorted", self.file, first_row + out_of_order([users, times], self._last), "user_id and time_ms"
        )
        self._last = (int(users[-1]), int(times[-1]))
        check_times(table, "time_ms", first_row, self.file, self._now_ms, self._findings)
        if self._known.users is not None:
            unseen = np.flatnonzero(~is_known(users, self._known.users))
            self._findings.add_rows("unseen-user", self.file, first_row + unseen)
        self._check_lists(table, first_row)

    def _check_lists(self, table: pa.Table, first_row: int) -> None:
        lists = [name for name in table.column_names if pa.types.is_list(table[name].type)]
        lengths = {name: integers_of(pc.list_value_length(table[name]))[0] for name in lists}
        for name in lists:
            wrong = np.flatnonzero(lengths[name] != lengths["item_id"])
            self._findings.add_rows("list-lengths", self.file, first_row + wrong, f"item_id and {name}")
        parent = {
            name: first_row + np.repeat(np.arange(table.num_rows), np.maximum(lengths[name], 0)) for name in lists
        }
        flat = {name: pc.list_flatten(table[name]) for name in lists}
        if self._known.items is not None:
            items, valid = integers_of(flat["item_id"])
            unknown = np.flatnonzero(valid & ~is_known(items, self._known.items))
            self._findings.add_rows("unknown-item", self.file, np.unique(parent["item_id"][unknown]))
        for name in lists:
            if name == "position":
                values, valid = integers_of(flat[name])
                self._note("position-range", parent[name], (values < 0) & valid, name)
            elif pa.types.is_floating(flat[name].type):
                bad = pc.invert(pc.is_finite(flat[name])).fill_null(False).to_numpy(zero_copy_only=False)
                self._note("not-finite", parent[name], bad, name)
            elif name.startswith(LABEL):
                values, valid = integers_of(flat[name])
                self._note("label-value", parent[name], valid & (values != 0) & (values != 1), name)

    def _note(self, rule: str, parent: Ints, wrong: NDArray[np.bool_], name: str) -> None:
        self._findings.add_rows(rule, self.file, np.unique(parent[wrong]), name)


def integers(table: pa.Table, name: str) -> tuple[Ints, NDArray[np.bool_]]:
    """A column of integers, 0 where it is null, and which rows are not null."""
    return integers_of(table[name])


def integers_of(column: pa.ChunkedArray | pa.Array) -> tuple[Ints, NDArray[np.bool_]]:
    """The same of a column on its own."""
    if isinstance(column, pa.Array):
        column = pa.chunked_array([column])
    valid = column.is_valid().to_numpy() if column.null_count else np.ones(len(column), dtype=bool)
    return np.asarray(column.fill_null(0).to_numpy(), dtype=np.int64), valid


def is_known(ids: Ints, known: Ints) -> NDArray[np.bool_]:
    """Which of `ids` are among `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(ids), dtype=bool)
    found = known[np.clip(np.searchsorted(known, ids), 0, len(known) - 1)]
    return np.asarray(found == ids)


def check_times(table: pa.Table, name: str, first_row: int, file: str, now_ms: int, findings: Findings) -> Ints:
    """Notes times before 1990 or after `now_ms` and a day; returns the others."""
    times, valid = integers(table, name)
    good = (times >= FIRST_MS) & (times <= now_ms + TOLERANCE_MS)
    findings.add_rows("time-range", file, first_row + np.flatnonzero(valid & ~good), name)
    return times[valid & good]


def _require(table: pa.Table, wanted: dict[str, pa.DataType | None], file: str, findings: Findings) -> bool:
    """Notes columns that are missing or of another type than wanted (None: any); whether all are as wanted."""
    good = True
    for name, type_ in wanted.items():
        if name not in table.column_names:
            findings.add("column-missing", file, name)
            good = False
        elif type_ is not None and table[name].type != type_:
            findings.add("column-type", file, f"{name} is {table[name].type}, allowed: {type_}")
            good = False
    return good


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
