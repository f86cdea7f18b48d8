"""Appends files of events to a store: logs that `tackboard init` can read, or JSON lines with one event per line.

The options that name a log's columns are the same as for `tackboard init`. The keys of a JSON line are names of the
store's columns. The keys of the user and the item are `user` and `item`, or `user_id` and `item_id`. Ids are text or
whole numbers; text is hashed by `string_id`. Decided: a file is appended in parts, and each part is stored before the
next part is appended. If appending stops half-way, append the same file again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.events.importer import ImportConfig, ImportReport, read_events
from tackboard.events.logs import find_logs
from tackboard.events.schema import FIELD_KINDS, field_names, ids_of, numpy_column
from tackboard.events.sequence_store.batch import columns_from_arrow
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.engine import Appended
from tackboard.events.sequence_store.interface import SequenceStore

EVENTS_PER_CALL = 20_000
LINES_PER_CALL = 1000


def read_log(config: ImportConfig) -> tuple[pa.Table, ImportReport]:
    """Reads a log; returns its events with user_id and item_id, in the order of the file, and a report of problems."""
    report = ImportReport()
    table = read_events(config, find_logs(config.files), report)
    for kind in ("user", "item"):
        table = table.append_column(f"{kind}_id", pa.array(ids_of(table[kind], kind)))
    return table, report


def config_of(table: pa.Table, max_events: int | None = None) -> StoreConfig:
    """Returns settings that declare the fields of `table`, and `request` and `position` if the table has them."""
    fields = {name: FIELD_KINDS[table[name].type] for name in field_names(table)}
    for name in ("request", "position"):
        if name in table.column_names:
            fields[name] = "int" if pa.types.is_integer(table[name].type) else "string"
    return StoreConfig(fields=fields) if max_events is None else StoreConfig(fields=fields, max_events=max_events)


def append_table(store: SequenceStore, table: pa.Table) -> Appended:
    """Appends a table of events in parts; returns the total counts of all parts. The table needs a column user_id."""
    answers = []
    for start in range(0, table.num_rows, EVENTS_PER_CALL):
        part = table.slice(start, EVENTS_PER_CALL)
        answers.append(store.append_many(numpy_column(part, "user_id"), columns_from_arrow(part, store.config)))
    return total(answers)


def append_json_lines(store: SequenceStore, lines: Iterable[str], name: str) -> Appended:
    """Appends events given as JSON lines, a thousand at a time. `name` is the file's name in error messages."""
    answers = []
    for first, users, events in _batches(lines, name):
        try:
            answers.append(store.append_many(users, events))
        except DataError as error:
            got = f"{name}, among lines {first} to {first + len(events) - 1}: {error.got}"
            raise DataError(got, allowed=error.allowed, fix=error.fix) from None
    return total(answers)


def total(answers: Iterable[Appended]) -> Appended:
    """Adds up the counts of several calls."""
    num_events = num_duplicates = num_forgotten = 0
    for answer in answers:
        num_events += answer.num_events
        num_duplicates += answer.num_duplicates
        num_forgotten += answer.num_forgotten
    return Appended(num_events, num_duplicates, num_forgotten)


def _batches(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[int], list[dict[str, Any]]]]:
    """Yields (number of the first line, user ids, events) for each block of at most 1,000 lines."""
    first, users, events = 1, [], []
    number = 0
    for number, line in enumerate(lines, start=1):
        user, event = _event(line, f"{name} line {number}")
        users.append(user)
        events.append(event)
        if len(events) == LINES_PER_CALL:
            yield first, users, events
            first, users, events = number + 1, [], []
    if events:
        yield first, users, events
    if not number:
        raise DataError(f"{name} is empty", fix="give a file with at least one event")


def _event(line: str, place: str) -> tuple[int, dict[str, Any]]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{place} is not JSON", allowed="allowed: one JSON object per line") from None
    if not isinstance(event, dict):
        raise DataError(f"{place} is JSON, but not an object", allowed="allowed: one JSON object per line")
    for kind in ("user", "item"):
        if kind in event:
            event[f"{kind}_id"] = event.pop(kind)
        value = event.get(f"{kind}_id")
        if isinstance(value, str) and value.strip():
            event[f"{kind}_id"] = string_id(value.strip())
        elif isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{place} has no valid {kind}", allowed="allowed: text or a whole number")
    return event.pop("user_id"), event
