"""A user's log in, a dataset and an account of what was wrong with the log out.

Each problem is counted and either fixed by a stated rule or, where too many rows would be lost, refused with the
numbers of the first offending rows. Nothing is written unless everything was read and accepted. The rules stand in
docs/events.md. Decided: exact duplicates are dropped, because logs are delivered at least once; rows that differ in
any imported column are kept, because users do repeat themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.core.hashing import mix64
from tackboard.events.columns import Ids, parse_ids, parse_names, parse_positions, parse_requests
from tackboard.events.dataset import check_name, write_dataset
from tackboard.events.entities import VALID_FROM
from tackboard.events.fields import check_field_name, parse_contexts, parse_field
from tackboard.events.schema import DEFAULT_ACTION, DEFAULT_SURFACE, NAMES, encode
from tackboard.events.tabular import Rows, inspect, read, require_columns
from tackboard.events.times import Times, parse_milliseconds, parse_times

BIRTH_COLUMNS = ("birth_ms", "birth", "born", "born_at", "created", "created_at", "published", "published_at")
"""Columns of an items file that are read as the item's birth; the first that exists is stored as birth_ms."""
ROWS_NAMED = 3
"""Offending rows that a refusal names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """What to import, and which of the file's columns means what."""

    file: Path
    """The log: CSV, gzipped CSV or Parquet."""
    user: str
    """Column of user ids."""
    item: str
    """Column of item ids."""
    time: str
    """Column of event times."""
    action: str | None = None
    """Column of actions; without one every event is an `event`."""
    surface: str | None = None
    """Column of surfaces; without one every surface is `default`."""
    request: str | None = None
    """Column of request ids."""
    position: str | None = None
    """Column of the item's position in its request, from 0."""
    received: str | None = None
    """Column of the time at which the log received the event; without one it is the event's time."""
    context: str | None = None
    """Column of contexts: one JSON object per event, or nothing."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further columns to keep: the field's name → the file's column."""
    items: Path | None = None
    """File of item attributes."""
    users: Path | None = None
    """File of user attributes."""
    max_bad_share: float = 0.01
    """Largest share of rows that may be dropped for empty ids, unparsable times or the wrong number of fields."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise UsageError(f"--max-bad-share {self.max_bad_share}", allowed="allowed: 0 to 1, e.g. 0.01 for 1%")
        for name, column in self.fields.items():
            check_field_name(name, column)


@dataclasses.dataclass
class ImportReport:
    """What was read and what was done about it; counts are rows."""

    rows_read: int = 0
    rows_kept: int = 0
    malformed: int = 0
    """Dropped: wrong number of fields."""
    empty_users: int = 0
    """Dropped: no user id."""
    empty_items: int = 0
    """Dropped: no item id."""
    unparsable_times: int = 0
    """Dropped: a time that cannot be read."""
    duplicates: int = 0
    """Dropped: equal to an earlier row in every imported column."""
    out_of_order: int = 0
    """Sorted: earlier than the row before it of the same user."""
    empty_actions: int = 0
    """Kept as `unknown`."""
    empty_surfaces: int = 0
    """Kept as `unknown`."""
    unparsable_received: int = 0
    """Kept: the event's time is used."""
    unparsable_positions: int = 0
    """Kept without a position."""
    item_attribute_rows_dropped: int = 0
    """Rows of the items file without a usable id or valid_from, or with an id seen before."""
    user_attribute_rows_dropped: int = 0
    """The same of the users file."""
    unparsable_births: int = 0
    """Items kept without a birth."""
    time_unit: str = ""
    """What the time column held."""

    def fixes(self) -> list[tuple[int, str]]:
        """(count, what was done) for every problem that occurred."""
        explained = (
            (self.malformed, "rows with the wrong number of fields: dropped"),
            (self.empty_users, "rows without a user: dropped"),
            (self.empty_items, "rows without an item: dropped"),
            (self.unparsable_times, "rows with an unparsable time: dropped"),
            (self.duplicates, "exact duplicates: dropped, the first kept"),
            (self.out_of_order, "rows out of order: sorted by time, file order kept within a tie"),
            (self.empty_actions, "empty actions: set to `unknown`"),
            (self.empty_surfaces, "empty surfaces: set to `unknown`"),
            (self.unparsable_received, "unparsable received times: set to the event's time"),
            (self.unparsable_positions, "unparsable positions: left empty"),
            (
                self.item_attribute_rows_dropped,
                "rows of the items file without a usable, new id or a usable valid_from: dropped",
            ),
            (
                self.user_attribute_rows_dropped,
                "rows of the users file without a usable, new id or a usable valid_from: dropped",
            ),
            (self.unparsable_births, "unparsable births in the items file: left empty"),
        )
        return [(count, text) for count, text in explained if count]


def import_log(config: ImportConfig, root: Path, name: str) -> tuple[Path, ImportReport]:
    """Imports a log as dataset `name` under `root`; returns the snapshot's path and the report.

    Raises DataError where the log breaks the rules, UsageError for wrong options; then nothing is written.
    """
    check_name(name)
    report = ImportReport()
    events = read_events(config, report)
    attributes: dict[str, pa.Table | None] = {"item": None, "user": None}
    for kind, path in (("item", config.items), ("user", config.users)):
        if path is not None:
            attributes[kind] = _read_attributes(config, kind, path, events.schema.field(kind).type, report)
    path = write_dataset(
        root,
        name,
        events,
        item_attributes=attributes["item"],
        user_attributes=attributes["user"],
        source={"kind": "import", "file": config.file.name, "report": dataclasses.asdict(report)},
    )
    return path, report


def read_events(config: ImportConfig, report: ImportReport) -> pa.Table:
    """The canonical events of a log, without ids and unsorted; fills `report`."""
    source = inspect(config.file)
    options = ("user", "item", "time", "action", "surface", "request", "position", "received", "context")
    wanted = {f"--{option}": value for option in options if (value := getattr(config, option)) is not None}
    require_columns(source, wanted)
    for column in config.fields.values():
        require_columns(source, {"--field": column})
    rows = read(source, [*wanted.values(), *config.fields.values()])
    report.rows_read = rows.table.num_rows + len(rows.malformed)
    if not report.rows_read:
        raise DataError(f"{config.file} has a header but no rows", fix="give a log with at least one event")
    users = parse_ids(rows.table[config.user], config.user)
    items = parse_ids(rows.table[config.item], config.item)
    times = parse_times(rows.table[config.time], config.time)
    report.time_unit = times.unit
    usable = _drop_bad(config, rows, users, items, times.good, report)
    table = rows.table.filter(pa.array(usable))
    columns: dict[str, Any] = {
        "user": users.values.filter(pa.array(usable)),
        "item": items.values.filter(pa.array(usable)),
        "action": _constant(DEFAULT_ACTION, len(table)),
        "surface": _constant(DEFAULT_SURFACE, len(table)),
        "time_ms": times.ms[usable],
        "received_ms": times.ms[usable],
        "order": np.flatnonzero(usable).astype(np.int64),
    }
    _add_optional(config, table, columns, report)
    if config.context is not None:
        columns["context"] = parse_contexts(
            table[config.context], config.context, lambda row: rows.line_of(int(columns["order"][row]))
        )
    for name, column in config.fields.items():
        columns[name] = parse_field(table[column], column, typed=source.format == "parquet")
    first = ~_duplicates(columns)
    report.duplicates = int((~first).sum())
    report.out_of_order = _num_out_of_order(columns)
    report.rows_kept = int(first.sum())
    return pa.table(columns).filter(pa.array(first))


def _drop_bad(
    config: ImportConfig, rows: Rows, users: Ids, items: Ids, good_time: NDArray[np.bool_], report: ImportReport
) -> NDArray[np.bool_]:
    """Which rows are usable. Raises DataError where more than the allowed share is not."""
    report.malformed = len(rows.malformed)
    report.empty_users, report.empty_items = int(users.empty.sum()), int(items.empty.sum())
    report.unparsable_times = int((~good_time).sum())
    usable = ~users.empty & ~items.empty & good_time
    num_bad = int((~usable).sum()) + len(rows.malformed)
    if num_bad == report.rows_read or num_bad > config.max_bad_share * report.rows_read:
        kinds = (
            ("without a user", np.flatnonzero(users.empty)),
            ("without an item", np.flatnonzero(items.empty)),
            ("with an unparsable time", np.flatnonzero(~good_time)),
        )
        named = [f"{len(bad):,} {text} ({_places(rows, bad)})" for text, bad in kinds if len(bad)]
        if len(rows.malformed):
            places = ", ".join(map(str, np.sort(rows.malformed)[:ROWS_NAMED].tolist()))
            named.append(f"{len(rows.malformed):,} with the wrong number of fields (line {places})")
        raise DataError(
            f"{num_bad:,} of {report.rows_read:,} rows of {config.file} cannot be used: {'; '.join(named)}",
            allowed=f"allowed: at most {config.max_bad_share:.1%} of the rows (--max-bad-share)",
            fix="correct these rows, check the column names given, or allow a larger share",
        )
    return np.asarray(usable)


def _places(rows: Rows, bad: NDArray[np.int64]) -> str:
    return "line " + ", ".join(str(rows.line_of(int(row))) for row in bad[:ROWS_NAMED])


def _add_optional(config: ImportConfig, table: pa.Table, columns: dict[str, Any], report: ImportReport) -> None:
    if config.action is not None:
        columns["action"], report.empty_actions = parse_names(table[config.action])
    if config.surface is not None:
        columns["surface"], report.empty_surfaces = parse_names(table[config.surface])
    if config.received is not None:
        received = parse_times(table[config.received], config.received)
        columns["received_ms"] = np.where(received.good, received.ms, columns["time_ms"])
        report.unparsable_received = int((~received.good).sum())
    if config.request is not None:
        columns["request"] = parse_requests(table[config.request])
    if config.position is not None:
        columns["position"], report.unparsable_positions = parse_positions(table[config.position])


def _constant(name: str, length: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(length, dtype=np.int32)), pa.array([name]))


def _codes(column: Any) -> NDArray[np.int64]:
    """A column as int64 numbers that are equal exactly where the values are equal."""
    if isinstance(column, np.ndarray):
        return column
    if pa.types.is_string(column.type):
        column = encode(column)
    if pa.types.is_dictionary(column.type):
        column = column.indices
    elif column.null_count or not pa.types.is_integer(column.type):
        column = column.dictionary_encode().indices
    return np.asarray(column.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)


def _duplicates(columns: dict[str, Any]) -> NDArray[np.bool_]:
    """Rows equal to an earlier row in every column but `order`.

    Rows are brought together by a 64-bit hash and then compared column by column, so a clash of hashes can never drop
    a row that differs.
    """
    codes = [_codes(column) for name, column in columns.items() if name != "order"]
    hashed = np.zeros(len(codes[0]), dtype=np.uint64)
    for depth, code in enumerate(codes):
        hashed = mix64(hashed + mix64(code, depth), depth)
    together = np.argsort(hashed, kind="stable")
    equal = np.ones(max(len(together) - 1, 0), dtype=bool)
    for code in codes:
        ordered = code[together]
        equal &= ordered[1:] == ordered[:-1]
    duplicate = np.zeros(len(together), dtype=bool)
    duplicate[together[1:][equal]] = True
    return duplicate


def _num_out_of_order(columns: dict[str, Any]) -> int:
    """Rows whose time lies before that of the previous row of the same user, in file order."""
    user, time_ms = _codes(columns["user"]), columns["time_ms"]
    by_user = np.argsort(user, kind="stable")
    same = user[by_user][1:] == user[by_user][:-1]
    return int((same & (np.diff(time_ms[by_user]) < 0)).sum())


def _read_attributes(
    config: ImportConfig, kind: str, path: Path, id_type: pa.DataType, report: ImportReport
) -> pa.Table:
    """The attribute table of a file, its id column renamed to `kind` and parsed like the events' ids."""
    source = inspect(path)
    id_column = getattr(config, kind) if getattr(config, kind) in source.columns else source.columns[0]
    others = [name for name in source.columns if name != id_column]
    if VALID_FROM in others and "valid_from" in others:
        raise DataError(f"{path} has both valid_from and {VALID_FROM}", fix="remove or rename one of them")
    if kind in others:
        raise DataError(f"{path} has a column {kind!r} that is not its id column {id_column!r}", fix="rename it")
    birth = next((name for name in BIRTH_COLUMNS if name in others), None) if kind == "item" else None
    valid_from = next((name for name in (VALID_FROM, "valid_from") if name in others), None)
    rows = read(source, as_text=[name for name in (id_column, birth, valid_from) if name is not None])
    ids = parse_ids(rows.table[id_column], id_column, "int64" if pa.types.is_integer(id_type) else "string")
    codes = ids.codes
    # An empty id's placeholder may equal a real id and stand before it: look for firsts among the usable rows only.
    good = np.flatnonzero(~ids.empty)
    since = None if valid_from is None else _parse_valid_from(rows.table[valid_from], valid_from)
    if since is None:
        keep = good[np.sort(np.unique(codes[good], return_index=True)[1])]
    else:
        keep = good = good[since.good[good]]
    num_rows = len(codes) + len(rows.malformed)
    setattr(report, f"{kind}_attribute_rows_dropped", num_rows - len(keep))
    _check_attribute_loss(config, path, num_rows - len(good), num_rows, valid_from)
    table = rows.table.select(others).take(pa.array(keep))
    if birth is not None:
        births = parse_times(table[birth], birth)
        report.unparsable_births = int((~births.good).sum())
        table = table.drop_columns([birth]).append_column("birth_ms", pa.array(births.ms, mask=~births.good))
    if since is not None:
        table = table.drop_columns([valid_from]).append_column(VALID_FROM, pa.array(since.ms[keep]))
    return table.add_column(0, kind, ids.values.take(pa.array(keep)).cast(id_type if id_type == pa.int64() else NAMES))


def _parse_valid_from(column: pa.ChunkedArray, name: str) -> Times:
    return parse_milliseconds(column, name) if name == VALID_FROM else parse_times(column, name)


def _check_attribute_loss(
    config: ImportConfig, path: Path, num_bad: int, num_rows: int, valid_from: str | None
) -> None:
    if num_bad > config.max_bad_share * num_rows:
        or_time = "" if valid_from is None else f", or no usable {valid_from}"
        raise DataError(
            f"{num_bad:,} of {num_rows:,} rows of {path} have no id that could match the events'{or_time}",
            allowed=f"allowed: at most {config.max_bad_share:.1%} of the rows (--max-bad-share)",
            fix="check that its first column, or one named like the events' column, holds the ids",
        )


def default_name(source: Path) -> str:
    """A dataset name from a file name: `My log.csv.gz` becomes `My-log`."""
    stem = source.name
    for suffix in (".gz", ".csv", ".tsv", ".txt", ".parquet", ".pq"):
        stem = stem.removesuffix(suffix)
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in stem)
    return kept.strip("-._")[:100] or "log"
