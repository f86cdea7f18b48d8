"""This module parses files of impressions (items that requests showed), and reads stored impressions bucket by bucket.

    impressions.parquet   user_id, time_ms, request, position, item_id    of a log; sorted by these columns
                          request, position, item_id                      of a synthetic world

If the file has no columns user_id and time_ms, an impression gets the user and time of the first event of its request.
With `--shown view`, the file is not read, and the events of the action `view` are the impressions. If two users have
the same request id, these are two requests. Impressions without a request or a user are left out and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import did_you_mean
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.events.attributes import VALID_FROM
from tackboard.events.columns import Place, one_array, parse_ids, parse_positions, parse_requests
from tackboard.events.dataset import Dataset
from tackboard.events.layout import Layout, RowReader
from tackboard.events.logs import Log, find_logs, read_log
from tackboard.events.schema import id_type, ids_of, numpy_column
from tackboard.events.stored_tables import reading, row_groups
from tackboard.events.tabular import inspect
from tackboard.events.times import parse_times

IMPRESSIONS = "impressions.parquet"
COLUMNS = ("user_id", "time_ms", "request", "position", "item_id")
NO_POSITION = 1 << 31
"""Replaces a missing position when rows are sorted, so that missing positions come last."""
ROWS_PER_PART = 1 << 19
"""Number of impressions that are processed at a time."""
ROWS_NAMED = 3
"""An error names at most this many bad rows."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """The impressions of some files. `table` has the columns `COLUMNS`, and its rows are sorted by these columns.

    `users` and `items` hold the distinct raw ids, in the types of the events' ids.
    """

    table: pa.Table
    users: pa.Array
    items: pa.Array
    num_dropped: int
    num_unparsable_positions: int


def parse_impressions(
    paths: Sequence[Path], columns: Mapping[str, str], events: pa.Table, max_bad_share: float
) -> Shown:
    """Reads files of impressions.

    `columns` maps `user`, `item`, `time`, `request` and perhaps `position` to columns of the files. Positions come
    from the column that `columns` names, or else from a column named `position`. If the first file has neither column,
    positions are missing. Ids and requests get the types that they have in `events`. A row without a usable user, item,
    time or request is dropped. Raises DataError if all rows, or more than `max_bad_share` of them, would be dropped.
    """
    if "request" not in columns or "request" not in events.column_names:
        raise UsageError(
            "--impressions needs --request, which is missing", fix="name the column of request ids: --request COLUMN"
        )
    files = find_logs(paths)
    wanted = {f"--{name}": columns[name] for name in ("user", "item", "time", "request")}
    has = inspect(files[0]).columns
    position = next((name for name in (columns.get("position"), "position") if name in has), None)
    log = read_log(files, wanted, {} if position is None else {"position": position})

    def raw(name: str) -> tuple[pa.ChunkedArray, str]:
        return log.columns[columns[name]], columns[name]

    user, item = (
        parse_ids(*raw(kind), wanted=id_type(events.schema.field(kind).type), place=log.place_of)
        for kind in ("user", "item")
    )
    times = parse_times(*raw("time"), log.place_of)
    requests = parse_requests(*raw("request"), log.place_of)
    requests = _as_type(requests, events.schema.field("request").type, columns["request"], log.place_of)
    good = ~user.empty & ~item.empty & times.good & requests.is_valid().to_numpy(zero_copy_only=False)
    _check_loss(log, good, max_bad_share)
    keep = pa.array(good)
    places, num_unparsable = pa.nulls(len(good), pa.int32()).filter(keep), 0
    if position is not None:
        places, num_unparsable = parse_positions(log.columns[position].filter(keep), position, log.place_of)
    users, items = user.values.filter(keep), item.values.filter(keep)
    columns_in_order = ids_of(users, "user"), times.ms[good], requests.filter(keep), places, ids_of(items, "item")
    table = pa.table(dict(zip(COLUMNS, columns_in_order, strict=True)))
    keys = [numpy_column(table, "item_id"), positions_of(table), *common_codes(table["request"])]
    order = np.lexsort((*keys, numpy_column(table, "time_ms"), numpy_column(table, "user_id")))
    num_dropped = log.num_rows + log.num_malformed - table.num_rows
    return Shown(table.take(pa.array(order)), users.unique(), items.unique(), num_dropped, num_unparsable)


def with_ids(attributes: pa.Table | None, kind: str, ids: pa.Array) -> pa.Table:
    """Adds a row with null attributes for every id in `ids` that is not in the column `kind` of `attributes`.

    If attributes change with time, the new rows are valid from time 0.
    """
    if attributes is None:
        return pa.table({kind: ids})
    listed = np.isin(ids_of(ids, kind), ids_of(attributes[kind], kind))
    new = ids.filter(pa.array(~listed))
    columns = [new if name == kind else pa.nulls(len(new), attributes[name].type) for name in attributes.column_names]
    if VALID_FROM in attributes.column_names:
        columns[attributes.column_names.index(VALID_FROM)] = pa.array(np.zeros(len(new), dtype=np.int64))
    return pa.concat_tables([attributes, pa.table(columns, names=attributes.column_names).cast(attributes.schema)])


def _check_loss(log: Log, good: NDArray[np.bool_], max_bad_share: float) -> None:
    num_rows, num_bad = log.num_rows + log.num_malformed, int((~good).sum()) + log.num_malformed
    if num_bad < num_rows and num_bad <= max_bad_share * num_rows:
        return
    places = [*map(log.place_of, np.flatnonzero(~good)[:ROWS_NAMED].tolist()), *log.malformed_places(ROWS_NAMED)]
    raise DataError(
        f"{num_bad:,} of {num_rows:,} rows of {log.title} have no usable user, item, time or request"
        + (f": {', '.join(places[:ROWS_NAMED])}" if places else ""),
        allowed=f"allowed: at most {max_bad_share:.1%} of the rows (--max-bad-share)",
        fix="correct these rows, check the given column names, or allow a larger share",
    )


@dataclasses.dataclass
class Impressions:
    """Reads a dataset's impressions bucket by bucket: from events of the action `shown`, or from `table` or `reader`.

    `offsets` holds the first row of each bucket in the table or file, followed by the number of all rows. Impressions
    without a request or without a user are left out, and `without_request` and `without_user` count them.
    """

    shown: str | None = None
    table: pa.Table | None = None
    reader: RowReader | None = None
    offsets: NDArray[np.int64] | None = None
    without_request: int = 0
    without_user: int = 0

    def of_bucket(self, bucket: int, events: pa.Table) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yields pairs of tables: the bucket's impressions that have a request, and the events of the same users.

        The impressions have the columns `COLUMNS`. `events` holds all events of the bucket, and each event is yielded
        once. A bucket can have very many impressions, because few impressions lead to an action. So a pair has about
        ROWS_PER_PART impressions, or more if one user has more. With `shown`, one pair holds the whole bucket.
        """
        if self.shown is not None:
            rows = events.filter(pc.equal(events["action"], self.shown))
            if "position" not in rows.column_names:
                rows = rows.append_column("position", pa.nulls(rows.num_rows, pa.int32()))
            yield self._with_request(rows.select(list(COLUMNS))), events
            return
        assert self.offsets is not None
        first, end = int(self.offsets[bucket]), int(self.offsets[bucket + 1])
        users, num_before = numpy_column(events, "user_id"), 0
        rows = self._read(first, min(first + ROWS_PER_PART, end))
        first += rows.num_rows
        while first < end:
            # The last user may have more rows in the next part, so the rows of this user wait for the next part.
            of_rows = numpy_column(rows, "user_id")
            num_whole = int(np.searchsorted(of_rows, of_rows[-1]))
            if num_whole:
                num_events = int(np.searchsorted(users, of_rows[-1])) - num_before
                yield self._with_request(rows.slice(0, num_whole)), events.slice(num_before, num_events)
                num_before += num_events
            more = self._read(first, min(first + ROWS_PER_PART, end))
            first += more.num_rows
            rows = pa.concat_tables([rows.slice(num_whole), more])
        yield self._with_request(rows), events.slice(num_before)

    def _read(self, first: int, last: int) -> pa.Table:
        if self.reader is not None:
            return self.reader.read([(first, last)], COLUMNS)
        assert self.table is not None
        return self.table.slice(first, last - first)

    def _with_request(self, rows: pa.Table) -> pa.Table:
        known = rows.filter(pc.is_valid(rows["request"]))
        self.without_request += rows.num_rows - known.num_rows
        return known

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


def open_impressions(dataset: Dataset, shown: str | None = None) -> Impressions:
    """Opens the impressions of `dataset`: the rows of impressions.parquet or, with `shown`, the events of this action.

    Raises DataError if the file is needed but missing, or if the events have no requests.
    """
    event_types = pq.read_schema(dataset.events_path)
    if "request" not in event_types.names:
        raise DataError(
            f"the events of {dataset.path} have no requests, so actions cannot be joined to impressions",
            fix="import the log again with `tackboard init … --request COLUMN`",
        )
    if shown is not None:
        check_action(dataset, shown, f"--shown {shown}")
        return Impressions(shown=shown)
    path = dataset.path / IMPRESSIONS
    if not path.exists():
        raise DataError(
            f"{dataset.path} does not say what was shown",
            allowed="either import the log again with `tackboard init … --impressions FILE`",
            fix="or name the action that means that an item was shown, e.g. --shown view",
        )
    with reading(path):
        types = pq.read_schema(path)
    if types.field("request").type != event_types.field("request").type:
        raise DataError(
            f"request is {types.field('request').type} in {IMPRESSIONS}",
            allowed=f"allowed: {event_types.field('request').type}, as in the events",
        )
    if "user_id" in types.names:
        return Impressions(reader=RowReader(path), offsets=_offsets(path, dataset.layout))
    table, num_unknown = _placed(dataset)
    offsets = dataset.layout.with_rows("impressions", numpy_column(table, "user_id")).offsets["impressions"]
    return Impressions(table=table, offsets=offsets, without_user=num_unknown)


def common_codes(*columns: pa.ChunkedArray | pa.Array) -> list[NDArray[np.int64]]:
    """Replaces values by numbers that sort in the same order. Equal values get equal numbers, even across columns.

    All columns must have the same type, int64 or string. Strings are compared by their UTF-8 bytes. A null becomes -1.
    """
    arrays = [one_array(column) for column in columns]
    encoded = pa.concat_arrays(arrays).dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    codes = np.empty(len(order) + 1, dtype=np.int64)
    codes[order] = np.arange(len(order))
    codes[-1] = -1
    rows = codes[encoded.indices.fill_null(len(order)).to_numpy()]
    return np.split(rows, np.cumsum([len(array) for array in arrays])[:-1])


def positions_of(table: pa.Table) -> NDArray[np.int64]:
    """Returns the column position, with NO_POSITION for nulls."""
    return np.asarray(table["position"].cast(pa.int64()).fill_null(NO_POSITION).to_numpy())


def check_action(dataset: Dataset, action: str, option: str) -> None:
    """Raises UsageError if no event of `dataset` has the action."""
    if action not in dataset.actions:
        raise UsageError(
            f"{option}: no event of {dataset.name} has the action {action!r}",
            allowed=f"actions in the dataset: {', '.join(dataset.actions[:40])}",
            fix=did_you_mean(action, dataset.actions),
        )


def _as_type(requests: pa.Array, wanted: pa.DataType, name: str, place: Place) -> pa.Array:
    """Casts request ids to their type in the events. If this is int64, text that is not an integer becomes null."""
    if requests.type == wanted:
        return requests
    if pa.types.is_string(wanted):
        return requests.cast(pa.string())
    numbers = parse_ids(pa.chunked_array([requests]), name, "int64", place)
    return pa.array(numbers.values.to_numpy(), mask=numbers.empty)


def _offsets(path: Path, layout: Layout) -> NDArray[np.int64]:
    """Returns the first row of each bucket in the file, followed by the number of rows. Reads a row group at a time."""
    counts = np.zeros(layout.num_buckets, dtype=np.int64)
    previous: int | None = None
    for table in row_groups(path, ["user_id"]):
        users = table["user_id"].to_numpy()
        if (users[1:] < users[:-1]).any() or (previous is not None and len(users) and users[0] < previous):
            raise CorruptFileError(f"{path} is not sorted by user_id")
        previous = int(users[-1]) if len(users) else previous
        counts += np.bincount(layout.buckets_of(users), minlength=layout.num_buckets)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _placed(dataset: Dataset) -> tuple[pa.Table, int]:
    """Returns a world's impressions with users and times, and the number of impressions that were left out.

    Each impression gets the user and time of the first event of its request, and is left out if there is no such event.
    Decided: the whole table is in memory, because only synthetic worlds have impressions without users.
    """
    table = dataset.read_impressions()
    assert table is not None
    events = dataset.read_events(["request", "user_id", "time_ms"])
    events = events.filter(pc.is_valid(events["request"]))
    of_events, of_rows = common_codes(events["request"], table["request"])
    users, times = numpy_column(events, "user_id"), numpy_column(events, "time_ms")
    order = np.lexsort((users, times, of_events))
    codes, first = np.unique(of_events[order], return_index=True)
    place = np.minimum(np.searchsorted(codes, of_rows), max(len(codes) - 1, 0))
    known = (codes[place] == of_rows) & (of_rows >= 0) if len(codes) else np.zeros(len(of_rows), dtype=bool)
    chosen = order[first][place[known]] if len(codes) else np.zeros(0, dtype=np.int64)
    rows = table.filter(pa.array(known))
    rows = rows.append_column("user_id", pa.array(users[chosen])).append_column("time_ms", pa.array(times[chosen]))
    sorted_rows = np.lexsort((positions_of(rows), of_rows[known], times[chosen], users[chosen]))
    return rows.select(list(COLUMNS)).take(pa.array(sorted_rows)), int((~known).sum())
