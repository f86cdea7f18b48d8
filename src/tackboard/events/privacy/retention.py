"""This module makes the next snapshot of a dataset, without old events and without forgotten users.

A forgotten user is removed from every file: events, features, users, versions of attributes, impressions and requests.
Items stay. Events are read and written one bucket (a group of users) at a time. Small buckets are joined, and a user is
never split. Decided: a user who loses all events, impressions and requests is removed completely. A user who never had
any of these, and is known only from the file of attributes, stays. The features of a remaining event keep their values.

The removed data remains in older snapshots. `prune` removes the older snapshots that no unfinished run needs. If
`prune` cannot find out which snapshot an unfinished run needs, it raises an error and removes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.documents import read_document
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import reach, read_json, remove_directory, remove_leftovers, write_json_atomic
from tackboard.events.attributes import VALID_FROM
from tackboard.events.checks.measures import DAY_MS, IdCounts, newest_time
from tackboard.events.dataset import EVENTS, INDEX, ITEMS, LATEST, LIVE_COUNTS, REQUESTS, TRUTH, Dataset
from tackboard.events.layout import FILE_NAME as LAYOUT
from tackboard.events.layout import ROWS_PER_BUCKET, Layout, RowReader, write_buckets
from tackboard.events.privacy.forgetting import (
    Forgotten,
    read_forgotten,
    remains_in,
    require_clean,
    snapshots_of,
    without_values,
)
from tackboard.events.schema import numpy_column, without_unused_names
from tackboard.events.staging import derive_snapshot
from tackboard.events.statistics import describe
from tackboard.events.stored_tables import reading, row_groups

FEATURES, IMPRESSIONS = "features.parquet", "impressions.parquet"
USERS, USER_HISTORY, STATISTICS = "users.parquet", "user_history.parquet", "statistics.json"
REWRITTEN = (EVENTS, FEATURES, IMPRESSIONS, REQUESTS, ITEMS, USERS, USER_HISTORY, STATISTICS, LAYOUT)
WITHOUT_USERS = (
    *("item_history.parquet", "features.json", "labels.json", "pseudo_requests.json", "attributes.json"),
    LIVE_COUNTS,
    TRUTH,
)
"""Files that name no user. They stay unchanged in the new snapshot, but TRUTH is left out if old events are removed."""
MAX_DAYS = 36_500
Ints = NDArray[np.int64]
Spans = tuple[Ints, Ints, Ints, Ints]
"""Four parallel arrays: sorted distinct ids, and for each id the number of events, the first time and the last time."""


@dataclasses.dataclass(frozen=True)
class Retained:
    """Says what was removed. `path` is the snapshot that is now `latest`: the old snapshot if nothing was removed."""

    path: Path
    cutoff_ms: int | None
    num_events_removed: int
    num_users_removed: int
    num_forgotten_removed: int
    num_future: int = 0
    """Number of events more than a day in the future; 0 if `days` is None. They stay, but do not count as the newest
    event."""


def retain(dataset: Dataset, days: float | None = None, *, now_ms: int | None = None) -> Retained:
    """Makes the next snapshot from `dataset`, which is the newest snapshot. Points `latest` at the new snapshot.

    Leaves out the users on the dataset's list of forgotten users. With `days`, also leaves out the events, impressions
    and requests that are more than `days` older than the newest event. Events more than a day after `now_ms` (by
    default the clock's time) do not count as the newest, because otherwise one wrong clock could remove the entire log.
    If nothing would change, the old snapshot stays. Raises DataError if no event would remain, or if the snapshot has a
    file that this module does not know, because the file might hold users.
    """
    cutoff_ms, num_future = None, 0
    if days is not None:
        if not 0 < days <= MAX_DAYS:
            raise UsageError(f"--days is {days:g}", allowed=f"allowed: more than 0, at most {MAX_DAYS:,}")
        newest_ms, num_future = newest_time(dataset, "time_ms", now_ms=now_ms)
        cutoff_ms = newest_ms - int(days * DAY_MS)
    forgotten = read_forgotten(dataset.path.resolve().parent)
    held = remains_in(dataset.path, forgotten)
    is_old = cutoff_ms is not None and _first_ms(dataset) < cutoff_ms
    if not held.num_users and not is_old:
        return Retained(dataset.path, cutoff_ms, 0, 0, 0, num_future)
    _refuse_unknown(dataset)
    writer = _Writer(dataset, forgotten, cutoff_ms if is_old else None)
    digest = hashlib.sha256(forgotten.user_ids.tobytes()).hexdigest()
    # The oracle of a synthetic world needs truth.json and all events of a user from the first event on. So if old
    # events are removed, truth.json is removed too.
    replaced = (*REWRITTEN, TRUTH) if is_old else REWRITTEN
    path = derive_snapshot(
        dataset, "retention", {"cutoff_ms": cutoff_ms, "forgotten": digest}, replaced=replaced, fill=writer.fill
    )
    # Another process may have added a user to the list of forgotten users after this function read the list.
    require_clean(path, read_forgotten(path.parent))
    now = pq.read_metadata(path / USERS).num_rows
    before = pq.read_metadata(dataset.path / USERS).num_rows
    num_left = pq.read_metadata(path / EVENTS).num_rows
    return Retained(path, cutoff_ms, dataset.num_events - num_left, before - now, held.num_users, num_future)


def _first_ms(dataset: Dataset) -> int:
    """Returns the oldest time of all events, impressions and requests of the snapshot."""
    first = int(dataset.statistics["first_ms"])
    for path in (dataset.path / IMPRESSIONS, dataset.path / REQUESTS):
        if path.is_file() and "time_ms" in pq.read_schema(path).names:
            times = [pc.min(table["time_ms"]).as_py() for table in row_groups(path, ["time_ms"])]
            first = min([first, *times])
    return first


def _refuse_unknown(dataset: Dataset) -> None:
    known = {*REWRITTEN, *WITHOUT_USERS}
    for entry in dataset.manifest["files"]:
        if entry["name"] not in known:
            raise DataError(
                f"{dataset.path / str(entry['name'])} may hold users, and this tackboard does not know the file",
                allowed=f"allowed: {', '.join(sorted(known))}",
                fix="use a newer tackboard, or make the dataset again without this file",
            )


class _Writer:
    """Writes the files of a snapshot without some of its rows."""

    def __init__(self, dataset: Dataset, forgotten: Forgotten, cutoff_ms: int | None) -> None:
        self._dataset, self._forgotten, self._cutoff_ms = dataset, forgotten, cutoff_ms
        self._left, self._lost = IdCounts(), IdCounts()
        self._users: list[Spans] = []
        self._items: list[Spans] = []
        self._requests: list[pa.Array] = []
        self._first_users: list[int] = []
        self._num_rows: list[int] = []

    def fill(self, staging: Path) -> list[str]:
        """Writes a layout, and each file of `REWRITTEN` that the old snapshot has. Returns the names of the files."""
        self._write_events(staging)
        if not self._num_rows:
            raise DataError(
                f"no event of {self._dataset.path} would remain", fix="give a larger --days, or remove the dataset"
            )
        offsets = np.concatenate([[0], np.cumsum(self._num_rows)]).astype(np.int64)
        layout = Layout(np.array(self._first_users, dtype=np.int64), {"events": offsets})
        if self._has(REQUESTS):
            layout = self._write_requests(staging / REQUESTS, layout)
        layout.write(staging)
        if self._has(IMPRESSIONS):
            self._write_impressions(staging / IMPRESSIONS)
        self._write_entities(staging)
        reach("statistics.json:before-describe")
        columns = ["user", "item", "action", "surface", "time_ms", "user_id", "item_id", *self._dataset.fields]
        items = pq.read_table(staging / ITEMS)
        write_json_atomic(staging / STATISTICS, describe(pq.read_table(staging / EVENTS, columns=columns), items))
        return [name for name in REWRITTEN if name == LAYOUT or self._has(name)]

    def _has(self, name: str) -> bool:
        return (self._dataset.path / name).is_file()

    def _kept(self, table: pa.Table) -> NDArray[np.bool_]:
        """Returns a mask of the rows that stay. Notes which users keep rows and which lose rows."""
        users = numpy_column(table, "user_id")
        kept = ~self._forgotten.holds(users)
        if self._cutoff_ms is not None:
            kept &= numpy_column(table, "time_ms") >= self._cutoff_ms
        self._left.add(users[kept])
        self._lost.add(users[~kept])
        return np.asarray(kept)

    def _write_events(self, staging: Path) -> None:
        names = [EVENTS, FEATURES] if self._has(FEATURES) else [EVENTS]
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(contextlib.closing(RowReader(self._dataset.path / name))) for name in names]
            reach(f"{EVENTS}:before-write")
            writers = [
                stack.enter_context(pq.ParquetWriter(staging / name, reader.schema))
                for name, reader in zip(names, readers, strict=True)
            ]
            held: list[list[pa.Table]] = []
            layout = self._dataset.layout
            for bucket in range(layout.num_buckets):
                span = layout.rows_of("events", bucket)
                tables = [reader.read([span], reader.schema.names) for reader in readers]
                kept = self._kept(tables[0])
                self._note_gone(tables[0], kept)
                if kept.any():
                    held.append([table.filter(pa.array(kept)) for table in tables])
                is_last = bucket == layout.num_buckets - 1
                if held and (is_last or sum(pieces[0].num_rows for pieces in held) >= ROWS_PER_BUCKET):
                    self._write_bucket(writers, held)
                    held = []
                    reach(f"{EVENTS}:after-group")
        reach(f"{EVENTS}:after-write")

    def _write_bucket(self, writers: Sequence[pq.ParquetWriter], held: list[list[pa.Table]]) -> None:
        for place, writer in enumerate(writers):
            table = _joined([pieces[place] for pieces in held])
            writer.write_table(table, row_group_size=table.num_rows)
            if place == 0:
                users, times = numpy_column(table, "user_id"), numpy_column(table, "time_ms")
                self._first_users.append(int(users[0]))
                self._num_rows.append(len(users))
                self._users.append(_spans_of(users, times))
                self._items.append(_spans_of(numpy_column(table, "item_id"), times))

    def _note_gone(self, events: pa.Table, kept: NDArray[np.bool_]) -> None:
        """Remembers requests that lose all their events.

        If impressions have no column of users, the impressions of these requests are removed.
        """
        if "request" in events.column_names and self._has(IMPRESSIONS) and not kept.all():
            gone = pc.unique(events["request"].filter(pa.array(~kept))).drop_null()
            # A request belongs to one user, so its events all lie in this bucket. If an event stays, the request stays.
            stays = pc.is_in(gone, value_set=pc.unique(events["request"].filter(pa.array(kept))))
            self._requests.append(gone.filter(pc.invert(stays)))

    def _write_entities(self, staging: Path) -> None:
        _write(self._with_spans(ITEMS, "item_id", self._items), staging / ITEMS)
        users = self._with_spans(USERS, "user_id", self._users)
        ids = numpy_column(users, "user_id")
        stays = np.isin(ids, self._left.result()[0]) | ~np.isin(ids, self._lost.result()[0])
        users = users.filter(pa.array(stays & ~self._forgotten.holds(ids)))
        _write(users, staging / USERS)
        if self._has(USER_HISTORY):
            history = self._read(USER_HISTORY)
            ids = numpy_column(history, "user_id")
            stays = np.isin(ids, numpy_column(users, "user_id"))
            if self._cutoff_ms is not None:
                # A version that was replaced at or before the cutoff is valid for no remaining event, so it is dropped.
                since = numpy_column(history, VALID_FROM)
                stays[:-1] &= (ids[1:] != ids[:-1]) | (since[1:] > self._cutoff_ms)
            _write(history.filter(pa.array(stays)), staging / USER_HISTORY)

    def _read(self, name: str) -> pa.Table:
        with reading(self._dataset.path / name):
            return pq.read_table(self._dataset.path / name)

    def _with_spans(self, name: str, id_name: str, parts: list[Spans]) -> pa.Table:
        """Reads a table of items or users. Computes num_events, first_ms and last_ms from the remaining events."""
        table = self._read(name)
        ids, counts, first, last = _merged(parts)
        wanted = numpy_column(table, id_name)
        place = np.clip(np.searchsorted(ids, wanted), 0, len(ids) - 1)
        known = ids[place] == wanted
        columns: dict[str, Any] = {
            "num_events": pa.array(np.where(known, counts[place], 0)),
            "first_ms": pa.array(first[place], mask=~known),
            "last_ms": pa.array(last[place], mask=~known),
        }
        for column, values in columns.items():
            if column in table.column_names:
                index = table.column_names.index(column)
                table = table.set_column(index, table.schema.field(column), values)
        return table

    def _write_impressions(self, path: Path) -> None:
        old = self._dataset.path / IMPRESSIONS
        gone = pa.chunked_array(self._requests).combine_chunks() if self._requests else None
        with pq.ParquetWriter(path, pq.read_schema(old)) as out:
            for table in row_groups(old):
                if "user_id" in table.column_names:
                    table = table.filter(pa.array(self._kept(table)))
                elif gone is not None:
                    table = without_values(table, "request", pc.unique(gone))
                if table.num_rows:
                    out.write_table(without_unused_names(table), row_group_size=table.num_rows)
        reach(f"{IMPRESSIONS}:after-write")

    def _write_requests(self, path: Path, layout: Layout) -> Layout:
        """Writes requests.parquet in the buckets of `layout`. Returns `layout` with the offsets of this file added."""
        old, offsets = self._dataset.path / REQUESTS, [0]
        schema = pq.read_schema(old)
        with pq.ParquetWriter(path, schema) as out:
            kept = (table.filter(pa.array(self._kept(table))) for table in row_groups(old))
            for bucket in _cut(kept, layout.first_users[1:], schema.empty_table()):
                if bucket.num_rows:
                    out.write_table(bucket, row_group_size=bucket.num_rows)
                offsets.append(offsets[-1] + bucket.num_rows)
        reach(f"{REQUESTS}:after-write")
        return Layout(layout.first_users, {**layout.offsets, "requests": np.array(offsets, dtype=np.int64)})


def _cut(tables: Iterator[pa.Table], bounds: Ints, nothing: pa.Table) -> Iterator[pa.Table]:
    """Cuts tables, sorted by user_id, at the users in `bounds`. Yields one table per bucket, even if it is empty."""
    held: list[pa.Table] = [nothing]
    bucket = 0
    for table in tables:
        users, start = numpy_column(table, "user_id"), 0
        while bucket < len(bounds) and len(users) and users[-1] >= bounds[bucket]:
            end = int(np.searchsorted(users, bounds[bucket]))
            yield _joined([*held, table.slice(start, end - start)])
            held, start, bucket = [nothing], end, bucket + 1
        held.append(table.slice(start))
    yield _joined(held)
    for _ in range(len(bounds) - bucket):
        yield nothing


def _joined(tables: list[pa.Table]) -> pa.Table:
    return without_unused_names(pa.concat_tables(tables).combine_chunks())


def _spans_of(ids: Ints, times: Ints) -> Spans:
    order = np.lexsort((times, ids))
    unique, start, counts = np.unique(ids[order], return_index=True, return_counts=True)
    return unique, counts, times[order][start], times[order][start + counts - 1]


def _merged(parts: list[Spans]) -> Spans:
    ids, counts, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
    unique, place = np.unique(ids, return_inverse=True)
    total = np.zeros(len(unique), dtype=np.int64)
    np.add.at(total, place, counts)
    earliest = np.full(len(unique), np.iinfo(np.int64).max)
    np.minimum.at(earliest, place, first)
    latest = np.full(len(unique), np.iinfo(np.int64).min)
    np.maximum.at(latest, place, last)
    return unique, total, earliest, latest


def _write(table: pa.Table, path: Path) -> None:
    rows = np.append(np.arange(0, table.num_rows, ROWS_PER_BUCKET), table.num_rows)
    write_buckets(without_unused_names(table), rows, path)
    reach(f"{path.name}:after-write")


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Names the removed snapshots, and maps each older snapshot that stays (`kept`) to the run that needs it."""

    removed: list[str]
    kept: dict[str, str]


def snapshots_in_use(folder: Path, runs: Path) -> dict[str, str]:
    """Returns the snapshots that unfinished runs under `runs` need, as a dict: name of the snapshot → name of the run.

    An unfinished run can be resumed, so it needs the snapshots that it reads. Raises UsageError if `runs` is not a
    folder, or if a run that may use the dataset in `folder` does not say which snapshot it needs.
    """
    if not runs.is_dir():
        raise UsageError(
            f"{runs} is not a folder of runs, so the snapshots that unfinished runs need are unknown",
            allowed="allowed: the folder of runs that `tackboard train` made, or an empty folder if there are no runs",
            fix="give --runs FOLDER",
        )
    needed: dict[str, str] = {}
    for run in sorted(path.parent for path in runs.glob("*/config.json") if not path.parent.is_symlink()):
        status = run / "STATUS"
        if status.is_file() and status.read_text().strip() == "done":
            continue
        state = run / "checkpoints" / LATEST / "state.json"
        if state.is_file():
            lineage = read_document(state, {"lineage.snapshot": str})["lineage"]
            names = (lineage["snapshot"], lineage.get("judged_snapshot"))
            needed |= {name: run.name for name in names if isinstance(name, str)}
        elif _may_mean(folder, run, runs):
            raise UsageError(
                f"{run} is unfinished and does not say which snapshot it needs",
                allowed="nothing was removed",
                fix=f"finish the run with `tackboard train … --resume {run}`, or remove its folder",
            )
    return needed


def _may_mean(folder: Path, run: Path, runs: Path) -> bool:
    """Returns whether a run may use the dataset in `folder`, according to the config of the run."""
    try:
        data = read_json(run / "config.json")["data"]
        named = [Path(str(data["dataset"])), *([Path(str(data["judged_on"]))] if data.get("judged_on") else [])]
    except (AttributeError, KeyError, TypeError):
        return True
    places = [place for name in named for place in (name, runs.resolve().parent / name) if place.exists()]
    return not places or any(place.resolve() == folder or folder in place.resolve().parents for place in places)


def prune(folder: Path, runs: Path) -> Pruned:
    """Removes every snapshot of a dataset's folder except `latest` and the snapshots that unfinished runs need.

    Also removes the folders under `index` whose snapshots do not exist any more.
    """
    folder = folder.resolve()
    needed = snapshots_in_use(folder, runs)
    latest = (folder / LATEST).resolve()
    removed, kept = [], {}
    remove_leftovers(folder)
    for path in snapshots_of(folder):
        if path == latest:
            continue
        if path.name in needed:
            kept[path.name] = needed[path.name]
        else:
            remove_directory(path)
            removed.append(path.name)
    indexes = folder / INDEX
    # If `index` is a link, nothing in it is removed, because the link could lead to the folder of another dataset.
    if not indexes.is_symlink():
        remove_leftovers(indexes)
        for index in indexes.glob("[!.]*"):
            if not (folder / index.name).exists():
                remove_directory(index)
    return Pruned(removed, kept)
