"""This module imports a log: it reads the files, writes a dataset, and reports the problems in the log.

Rows with a problem are counted, and are fixed or dropped by the rules in docs/events.md. If too many rows would be
dropped, the log is refused, and the error names the first bad rows. Nothing is written before all rows are checked.
Decided: exact duplicates are dropped, because log pipelines may deliver an event twice. Rows that differ in any
imported column are kept, because users do repeat themselves. Each raw column is freed as soon as it is parsed, so the
peak memory of an import is a few times the size of the canonical columns.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.core.hashing import mix64
from tackboard.core.progress import Progress
from tackboard.core.vocabulary import DEFAULT_ACTION, DEFAULT_SURFACE
from tackboard.events import schema
from tackboard.events.attributes import VALID_FROM
from tackboard.events.columns import Ids, Place, parse_ids, parse_names, parse_positions, parse_requests
from tackboard.events.dataset import check_place, write_dataset
from tackboard.events.fields import check_field_name, parse_contexts, parse_field
from tackboard.events.impressions import ROWS_NAMED, parse_impressions, with_ids
from tackboard.events.logs import Log, find_logs, read_log
from tackboard.events.privacy.forgetting import Forgotten, read_forgotten
from tackboard.events.schema import NAMES, encode, ids_of, named, numpy_column
from tackboard.events.tabular import FileRows, inspect, read
from tackboard.events.times import Times, parse_milliseconds, parse_times

BIRTH_COLUMNS = ("birth_ms", "birth", "born", "born_at", "created", "created_at", "published", "published_at")
"""Possible names of the column of items' creation times. The first of these that an items file has becomes birth_ms."""
_BLOCK_ROWS = 1 << 20
"""Number of rows that are hashed at a time, so that temporary arrays stay small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Says which files to import, and what their columns mean."""

    files: Sequence[Path]
    """Paths of the log. Each is a CSV, gzipped CSV or Parquet file, a folder of such files, or a pattern."""
    user: str
    """Column of user ids."""
    item: str
    """Column of item ids."""
    time: str
    """Column of event times."""
    action: str | None = None
    """Column of actions. If None, every action is `event`."""
    surface: str | None = None
    """Column of surfaces. If None, every surface is `default`."""
    request: str | None = None
    """Column of request ids."""
    position: str | None = None
    """Column of the item's position in its request, from 0. The log, the impressions or both have this column."""
    received: str | None = None
    """Column of the time at which the log received the event. If None, the time of the event is used instead."""
    context: str | None = None
    """Column of contexts. Each value is a JSON object or empty."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further columns to keep: the field's name → the file's column."""
    items: Path | None = None
    """File of item attributes."""
    users: Path | None = None
    """File of user attributes."""
    impressions: Sequence[Path] = ()
    """Files of impressions. The columns of users, items, times, requests and positions are named as in the log."""
    max_bad_share: float = 0.01
    """Largest share of rows that may be dropped because of empty ids, bad times or a wrong number of fields."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise UsageError(f"--max-bad-share is {self.max_bad_share}", allowed="allowed: 0 to 1, e.g. 0.01 for 1%")
        for name, column in self.fields.items():
            check_field_name(name, column)


def _fixed(what: str) -> int:
    """Returns a field of the report that counts rows with one kind of problem. `what` names the problem and the fix."""
    count: int = dataclasses.field(default=0, metadata={"fix": what})
    return count


@dataclasses.dataclass
class ImportReport:
    """Says what was read, and what was done about problems. All numbers are counts of rows."""

    rows_read: int = 0
    rows_kept: int = 0
    malformed: int = _fixed("rows with the wrong number of fields: dropped")
    empty_users: int = _fixed("rows without a user: dropped")
    empty_items: int = _fixed("rows without an item: dropped")
    unparsable_times: int = _fixed("rows with an unparsable time: dropped")
    duplicates: int = _fixed("exact duplicates: dropped, the first kept")
    out_of_order: int = _fixed("rows out of order: sorted by time, file order kept within a tie")
    empty_actions: int = _fixed("empty actions: set to `unknown`")
    empty_surfaces: int = _fixed("empty surfaces: set to `unknown`")
    unparsable_received: int = _fixed("unparsable received times: set to the event's time")
    unparsable_positions: int = _fixed("unparsable positions: left empty")
    item_attribute_rows_dropped: int = _fixed(
        "rows of the items file with a bad or repeated id, a bad valid_from or a wrong number of fields: dropped"
    )
    user_attribute_rows_dropped: int = _fixed(
        "rows of the users file with a bad or repeated id, a bad valid_from or a wrong number of fields: dropped"
    )
    unparsable_births: int = _fixed("unparsable births in the items file: left empty")
    impressions_kept: int = 0
    impression_rows_dropped: int = _fixed(
        "rows of the impressions file without a usable user, item, time or request: dropped"
    )
    impressions_without_position: int = 0
    """Kept impressions whose position was missing or unparsable."""
    unparsable_impression_positions: int = _fixed("unparsable positions in the impressions file: left empty")
    forgotten_events: int = 0
    """Events that are left out because their users are on the dataset's list of forgotten users."""
    forgotten_impressions: int = 0
    time_unit: str = ""
    """The unit or format of the time column."""

    def fixes(self) -> list[tuple[int, str]]:
        """Returns a pair for every problem that occurred: the number of rows, and what was done with them."""
        problems = [field for field in dataclasses.fields(self) if "fix" in field.metadata]
        return [(count, field.metadata["fix"]) for field in problems if (count := getattr(self, field.name))]


def import_log(config: ImportConfig, root: Path, name: str) -> tuple[Path, ImportReport]:
    """Imports a log as dataset `name` under `root`. Returns the snapshot's path and the report.

    Raises DataError if the log breaks the rules, and UsageError if an option is wrong. Then nothing is written.
    """
    check_place(root, name)
    report = ImportReport()
    files = find_logs(config.files)
    events = read_events(_without_others_position(config, files), files, report)
    attributes = {
        kind: None if path is None else _read_attributes(config, kind, path, events.schema.field(kind).type, report)
        for kind, path in (("item", config.items), ("user", config.users))
    }
    impressions = _read_impressions(config, events, attributes, report) if config.impressions else None
    _count_forgotten(read_forgotten(root / name), events, impressions, report)
    path = write_dataset(
        root,
        name,
        events,
        item_attributes=attributes["item"],
        user_attributes=attributes["user"],
        impressions=impressions,
        source={
            "kind": "import",
            "file": files[0].name,
            **({"num_files": len(files)} if len(files) > 1 else {}),
            "report": dataclasses.asdict(report),
        },
    )
    return path, report


def _without_others_position(config: ImportConfig, files: Sequence[Path]) -> ImportConfig:
    """Returns `config`, with `position` set to None if only the impressions, not the log, have that column."""
    if config.position is None or not config.impressions or config.position in inspect(files[0]).columns:
        return config
    shown = inspect(find_logs(config.impressions)[0]).columns
    return dataclasses.replace(config, position=None) if config.position in shown else config


def _count_forgotten(
    forgotten: Forgotten, events: pa.Table, impressions: pa.Table | None, report: ImportReport
) -> None:
    """Corrects the report: rows of forgotten users, which `write_dataset` will leave out, do not count as kept."""
    if not len(forgotten):
        return
    report.forgotten_events = int(forgotten.holds(ids_of(events["user"], "user")).sum())
    report.rows_kept -= report.forgotten_events
    if impressions is not None:
        others = impressions.filter(pa.array(~forgotten.holds(numpy_column(impressions, "user_id"))))
        report.forgotten_impressions = impressions.num_rows - others.num_rows
        report.impressions_kept = others.num_rows
        report.impressions_without_position = others["position"].null_count


def read_events(config: ImportConfig, files: Sequence[Path], report: ImportReport) -> pa.Table:
    """Returns the canonical events of a log, unsorted and without int64 ids. Fills in `report`."""
    options = ("user", "item", "time", "action", "surface", "request", "position", "received", "context")
    wanted = {f"--{option}": value for option in options if (value := getattr(config, option)) is not None}
    log = read_log(files, wanted, config.fields)
    report.rows_read = log.num_rows + log.num_malformed
    if not report.rows_read:
        raise DataError(f"{log.title} has a header but no rows", fix="give a log with at least one event")
    with Progress("parsing", total=len(wanted) + len(config.fields), unit="columns", quiet=not log.is_long) as progress:
        columns, kept_rows = _required_columns(config, log, report, progress)
        _add_optional(config, log, kept_rows, columns, report)
        progress.advance(len(wanted) + len(config.fields) - 3)
    num_rows = len(columns["order"])
    with Progress("looking for duplicates", total=num_rows, unit="rows", quiet=not log.is_long) as progress:
        report.out_of_order = _num_out_of_order(columns)
        duplicate = _duplicates(columns, progress)
    report.duplicates = 0 if duplicate is None else int(duplicate.sum())
    report.rows_kept = num_rows - report.duplicates
    return pa.table(columns if duplicate is None else _filtered(columns, ~duplicate))


def _required_columns(
    config: ImportConfig, log: Log, report: ImportReport, progress: Progress
) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
    """Returns the canonical columns of the usable rows, and the row numbers of these rows (None if all are usable)."""
    users = parse_ids(log.take(config.user), config.user, place=log.place_of)
    items = parse_ids(log.take(config.item), config.item, place=log.place_of)
    times = parse_times(log.take(config.time), config.time, log.place_of)
    progress.advance(3)
    report.time_unit = times.unit
    usable = _drop_bad(config, log, users, items, times.good, report)
    columns: dict[str, Any] = {"user": users.values, "item": items.values, "time_ms": times.ms}
    kept_rows = None
    if not usable.all():
        columns, kept_rows = _filtered(columns, usable), np.flatnonzero(usable)
    num_rows = len(columns["time_ms"])
    zeros = np.zeros(num_rows, dtype=np.int32)
    return {
        "user": columns["user"],
        "item": columns["item"],
        "action": named(zeros, [DEFAULT_ACTION]),
        "surface": named(zeros, [DEFAULT_SURFACE]),
        "time_ms": columns["time_ms"],
        "received_ms": columns["time_ms"],
        "order": np.arange(num_rows) if kept_rows is None else kept_rows,
    }, kept_rows


def _drop_bad(
    config: ImportConfig, log: Log, users: Ids, items: Ids, good_time: NDArray[np.bool_], report: ImportReport
) -> NDArray[np.bool_]:
    """Returns a mask of the usable rows. Raises DataError if all rows, or more than the allowed share, are unusable."""
    report.malformed = log.num_malformed
    report.empty_users, report.empty_items = int(users.empty.sum()), int(items.empty.sum())
    report.unparsable_times = int((~good_time).sum())
    usable = ~users.empty & ~items.empty & good_time
    num_bad = int((~usable).sum()) + log.num_malformed
    if num_bad == report.rows_read or num_bad > config.max_bad_share * report.rows_read:
        kinds = (
            ("without a user", np.flatnonzero(users.empty)),
            ("without an item", np.flatnonzero(items.empty)),
            ("with an unparsable time", np.flatnonzero(~good_time)),
        )
        problems = [
            f"{len(bad):,} {text} ({_places(log, [log.place_of(int(row)) for row in bad[:ROWS_NAMED]])})"
            for text, bad in kinds
            if len(bad)
        ]
        if log.num_malformed:
            places = _places(log, log.malformed_places(ROWS_NAMED))
            problems.append(f"{log.num_malformed:,} with the wrong number of fields ({places})")
        raise DataError(
            f"{num_bad:,} of {report.rows_read:,} rows of {log.title} cannot be used: {'; '.join(problems)}",
            allowed=f"allowed: at most {config.max_bad_share:.1%} of the rows (--max-bad-share)",
            fix="correct these rows, check the given column names, or allow a larger share",
        )
    return np.asarray(usable)


def _places(log: Log, places: list[str]) -> str:
    """Joins places into one phrase. If the log is one file, omits the file's name, because the message names it."""
    if len(log.parts) > 1:
        return ", ".join(places)
    words = [place.rsplit(" ", 2) for place in places]
    return f"{words[0][1]} {', '.join(word[2] for word in words)}"


def _filtered(columns: dict[str, Any], mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Returns the rows that `mask` marks. Removes each column from `columns` in turn, because this saves memory."""
    arrow_mask = pa.array(mask)
    filtered: dict[str, Any] = {}
    same_as_time = columns.get("received_ms") is columns["time_ms"]
    for name in list(columns):
        column = columns.pop(name)
        if name == "received_ms" and same_as_time:
            filtered[name] = filtered["time_ms"]
        else:
            filtered[name] = column[mask] if isinstance(column, np.ndarray) else column.filter(arrow_mask)
    return filtered


def _add_optional(
    config: ImportConfig,
    log: Log,
    kept_rows: NDArray[np.int64] | None,
    columns: dict[str, Any],
    report: ImportReport,
) -> None:
    """Parses the optional columns, the contexts and the fields of the usable rows, and adds them to `columns`."""
    place: Place = log.place_of if kept_rows is None else lambda row: log.place_of(int(kept_rows[row]))

    def raw(column: str) -> tuple[pa.ChunkedArray, str, Place]:
        values = log.take(column)
        return values if kept_rows is None else values.take(pa.array(kept_rows)), column, place

    if config.action is not None:
        columns["action"], report.empty_actions = parse_names(*raw(config.action))
    if config.surface is not None:
        columns["surface"], report.empty_surfaces = parse_names(*raw(config.surface))
    if config.received is not None:
        received = parse_times(*raw(config.received))
        columns["received_ms"] = np.where(received.good, received.ms, columns["time_ms"])
        report.unparsable_received = int((~received.good).sum())
    if config.request is not None:
        columns["request"] = parse_requests(*raw(config.request))
    if config.position is not None:
        columns["position"], report.unparsable_positions = parse_positions(*raw(config.position))
    if config.context is not None:
        columns["context"] = parse_contexts(*raw(config.context))
    for name, column in config.fields.items():
        columns[name] = parse_field(*raw(column), typed=log.typed)


def _codes(column: Any) -> NDArray[np.integer[Any]]:
    """Returns one integer per row of a column. Two rows get the same integer if and only if their values are equal."""
    if isinstance(column, np.ndarray):
        return column
    if pa.types.is_string(column.type):
        column = encode(column)
    if pa.types.is_dictionary(column.type):
        column = column.indices
    elif column.null_count or not pa.types.is_integer(column.type):
        column = column.dictionary_encode().indices
    return np.asarray(column.fill_null(-1).to_numpy(zero_copy_only=False))


def _duplicates(columns: dict[str, Any], progress: Progress) -> NDArray[np.bool_] | None:
    """Returns a mask of the duplicates, or None. A duplicate equals an earlier row in every column except `order`.

    Rows are grouped by a 64-bit hash and then compared column by column, so a hash collision never drops a row that is
    not a duplicate.
    """
    codes = [_codes(columns[name]) for name in columns if name != "order" and not _says_nothing(columns, name)]
    hashed = np.zeros(len(codes[0]), dtype=np.uint64)
    for start in range(0, len(hashed), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        for depth, code in enumerate(codes):
            hashed[block] = mix64(hashed[block] + mix64(code[block], depth), depth)
        progress.advance(len(hashed[block]))
    by_hash = np.argsort(hashed)
    ordered = hashed[by_hash]
    equal = ordered[1:] == ordered[:-1]
    if not equal.any():
        return None
    suspects = by_hash[np.append(equal, False) | np.append(False, equal)]
    del by_hash, ordered, equal
    # The sort above is unstable, because an unstable sort is faster. From here on, equal rows must be in file order.
    suspects.sort()
    suspects = suspects[np.argsort(hashed[suspects], kind="stable")]
    same = np.ones(len(suspects) - 1, dtype=bool)
    for code in codes:
        values = code[suspects]
        same &= values[1:] == values[:-1]
    duplicate = np.zeros(len(hashed), dtype=bool)
    duplicate[suspects[1:][same]] = True
    return duplicate


def _says_nothing(columns: dict[str, Any], name: str) -> bool:
    """Returns whether the search for duplicates can ignore a column, because it is constant or a copy of the times."""
    column = columns[name]
    if name == "received_ms":
        return column is columns["time_ms"]
    return isinstance(column, pa.DictionaryArray) and len(column.dictionary) == 1 and not column.null_count


def _num_out_of_order(columns: dict[str, Any]) -> int:
    """Counts the rows that have an earlier time than the previous row of the same user, in file order."""
    user, time_ms = _codes(columns["user"]), columns["time_ms"]
    if not (user[1:] >= user[:-1]).all():
        by_user = np.argsort(user, kind="stable")
        user, time_ms = user[by_user], time_ms[by_user]
    return int(((user[1:] == user[:-1]) & (time_ms[1:] < time_ms[:-1])).sum())


def _read_attributes(
    config: ImportConfig, kind: str, path: Path, id_type: pa.DataType, report: ImportReport
) -> pa.Table:
    """Reads a file of attributes. The id column is renamed to `kind` and parsed like the ids of the events."""
    source = inspect(path)
    id_column = getattr(config, kind) if getattr(config, kind) in source.columns else source.columns[0]
    others = [name for name in source.columns if name != id_column]
    if VALID_FROM in others and "valid_from" in others:
        raise DataError(f"{path} has both valid_from and {VALID_FROM}", fix="remove or rename one of them")
    if kind in others:
        raise DataError(
            f"{path} has a column {kind!r}, but its id column is {id_column!r}", fix=f"rename the column {kind!r}"
        )
    birth = next((name for name in BIRTH_COLUMNS if name in others), None) if kind == "item" else None
    valid_from = next((name for name in (VALID_FROM, "valid_from") if name in others), None)
    rows = read(source, as_text=[name for name in (id_column, birth, valid_from) if name is not None])
    if not rows.table.num_rows:
        raise DataError(f"{path} has a header but no rows", fix=f"give a file with at least one {kind}, or no file")
    ids = parse_ids(rows.table[id_column], id_column, schema.id_type(id_type), rows.place_of)
    codes = _codes(ids.values)
    # Only usable rows are searched for duplicates, because the placeholder of an empty id may equal a real id.
    good = np.flatnonzero(~ids.empty)
    since = None
    if valid_from is not None:
        parse = parse_milliseconds if valid_from == VALID_FROM else parse_times
        since = parse(rows.table[valid_from], valid_from, rows.place_of)
    if since is None:
        keep = good[np.sort(np.unique(codes[good], return_index=True)[1])]
    else:
        keep = good = good[since.good[good]]
        _refuse_same_version(kind, rows, ids, since, good)
    num_rows = len(codes) + len(rows.malformed)
    setattr(report, f"{kind}_attribute_rows_dropped", num_rows - len(keep))
    _check_attribute_loss(config, rows, good, valid_from)
    table = rows.table.select(others).take(pa.array(keep))
    if birth is not None:
        births = parse_times(table[birth], birth, lambda row: rows.place_of(int(keep[row])))
        report.unparsable_births = int((~births.good).sum())
        table = table.drop_columns([birth]).append_column("birth_ms", pa.array(births.ms, mask=~births.good))
    if since is not None:
        table = table.drop_columns([valid_from]).append_column(VALID_FROM, pa.array(since.ms[keep]))
    return table.add_column(0, kind, ids.values.take(pa.array(keep)).cast(id_type if id_type == pa.int64() else NAMES))


def _read_impressions(
    config: ImportConfig, events: pa.Table, attributes: dict[str, pa.Table | None], report: ImportReport
) -> pa.Table:
    """Reads the impressions. Adds their users and items to `attributes`, unless `attributes` lists them already."""
    options = ("user", "item", "time", "request", "position")
    columns = {option: value for option in options if (value := getattr(config, option)) is not None}
    shown = parse_impressions(config.impressions, columns, events, config.max_bad_share)
    for kind, ids in (("item", shown.items), ("user", shown.users)):
        attributes[kind] = with_ids(attributes[kind], kind, ids)
    report.impressions_kept, report.impression_rows_dropped = shown.table.num_rows, shown.num_dropped
    report.impressions_without_position = shown.table["position"].null_count
    report.unparsable_impression_positions = shown.num_unparsable_positions
    return shown.table


def _refuse_same_version(kind: str, rows: FileRows, ids: Ids, since: Times, good: NDArray[np.int64]) -> None:
    """Raises DataError if an id has two rows that are valid from the same time. The error names the lines."""
    codes = _codes(ids.values)
    order = good[np.lexsort((good, since.ms[good], codes[good]))]
    codes, times = codes[order], since.ms[order]
    again = np.flatnonzero((codes[1:] == codes[:-1]) & (times[1:] == times[:-1]))
    if not len(again):
        return
    first, second = int(order[again[0]]), int(order[again[0] + 1])
    # Messages never contain the raw id of a user.
    which = repr(ids.values[first].as_py()) if kind == "item" else f"one {kind}"
    raise DataError(
        f"{len(again):,} rows of the {kind}s repeat an id and a {VALID_FROM}: {which} at {since.ms[first]} "
        f"in {rows.place_of(first)} and {rows.unit} {rows.line_of(second)}",
        allowed="allowed: one row per id and time",
        fix="keep one row per id and time",
    )


def _check_attribute_loss(
    config: ImportConfig, rows: FileRows, good: NDArray[np.int64], valid_from: str | None
) -> None:
    num_rows = rows.table.num_rows + len(rows.malformed)
    num_bad = num_rows - len(good)
    if num_bad > config.max_bad_share * num_rows:
        bad = np.setdiff1d(np.arange(rows.table.num_rows), good)[:ROWS_NAMED]
        lines = sorted([*rows.malformed.tolist(), *(rows.line_of(int(row)) for row in bad)])[:ROWS_NAMED]
        or_time = "" if valid_from is None else f", or no usable {valid_from}"
        raise DataError(
            f"{num_bad:,} of {num_rows:,} rows of {rows.source.path} ({rows.unit} {', '.join(map(str, lines))}) "
            f"have no id that could match an event's id{or_time}, or a wrong number of fields",
            allowed=f"allowed: at most {config.max_bad_share:.1%} of the rows (--max-bad-share)",
            fix="check that the ids are in the first column, or in a column named like the log's column of ids",
        )


def default_name(source: Path) -> str:
    """Makes a dataset name from a path or a pattern. For example, `My log.csv.gz` becomes `My-log`."""
    if glob.has_magic(source.name) and not source.exists():
        source = source.parent
    stem = source.resolve().name if source.name in ("", "..") else source.name
    for suffix in (".gz", ".csv", ".tsv", ".txt", ".parquet", ".pq"):
        stem = stem.removesuffix(suffix)
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in stem)
    return kept.strip("-._")[:100] or "log"
