"""This module makes the tables of items and users, with one row per id, from events and optional attributes.

Decided: an id that occurs only in the attribute table is kept with num_events 0, because a new item must be rankable
before its first event. If attributes change with time, their table has a column valid_from_ms and may have several rows
per id. The table of items or users then holds the newest row of each id, and a table of versions holds all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tackboard.core.errors import DataError
from tackboard.events.columns import one_array
from tackboard.events.schema import encode, ids_of, numpy_column
from tackboard.events.vector_columns import with_vectors

RESERVED = ("first_ms", "last_ms", "num_events", "item_id", "user_id")
VALID_FROM = "valid_from_ms"
"""Name of the column that says from which time on (ms UTC) a row of an attribute table is valid."""


def entity_table(events: pa.Table, kind: str, attributes: pa.Table | None = None) -> pa.Table:
    """Returns the table of items or users (`kind` is `item` or `user`), with one row per id, sorted by id.

    The columns are the raw value, the id, num_events, first_ms, last_ms and the attributes. For an id without events,
    first_ms and last_ms are null. `attributes` has a column `item` or `user`, whose values are distinct and have the
    same type as in the events. All other columns of `attributes` are added to the table.
    """
    id_column, time_ms = numpy_column(events, f"{kind}_id"), numpy_column(events, "time_ms")
    # An unstable sort is several times faster, and it is enough, because all rows of an id have the same raw value.
    order = np.argsort(id_column)
    ids = id_column[order]
    start = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)
    ids = ids[start]
    times = time_ms[order]
    first = np.minimum.reduceat(times, start) if len(ids) else np.zeros(0, dtype=np.int64)
    last = np.maximum.reduceat(times, start) if len(ids) else np.zeros(0, dtype=np.int64)
    raw = encode_if_string(events[kind]).take(pa.array(order[start]))
    counts = np.diff(np.append(start, len(order)))
    table = _entities(kind, raw, ids, counts.astype(np.int64), pa.array(first), pa.array(last))
    return table if attributes is None else _with_attributes(table, kind, attributes)


def split_versions(kind: str, attributes: pa.Table | None) -> tuple[pa.Table | None, pa.Table | None]:
    """Returns the newest attributes of each id, and the table of versions (None if there is no column valid_from_ms).

    The table of versions has the id column, valid_from_ms and the attributes. Its rows are sorted by id, then by
    valid_from_ms. In both tables, a column of lists of floats becomes a column of vectors if all lists have the same
    length. Raises DataError if two rows have the same id and time, or if a time is null or not int64.
    """
    if attributes is None:
        return None, None
    attributes = with_vectors(attributes)
    if VALID_FROM not in attributes.column_names:
        return attributes, None
    _check_reserved(kind, attributes)
    if attributes[VALID_FROM].type != pa.int64():
        raise DataError(
            f"{VALID_FROM} of the {kind}s is {attributes[VALID_FROM].type}", allowed="allowed: int64, ms UTC"
        )
    if attributes[VALID_FROM].null_count:
        raise DataError(
            f"{attributes[VALID_FROM].null_count} rows of the {kind}s have no {VALID_FROM}",
            allowed="allowed: a time in every row",
        )
    ids, valid_from = ids_of(attributes[kind], kind), numpy_column(attributes, VALID_FROM)
    order = np.lexsort((valid_from, ids))
    ids, valid_from = ids[order], valid_from[order]
    same_id = ids[1:] == ids[:-1]
    twice = np.flatnonzero(same_id & (valid_from[1:] == valid_from[:-1]))
    table = attributes.combine_chunks().take(pa.array(order))
    if len(twice):
        # Messages never contain the raw id of a user.
        first = repr(table[kind][int(twice[0])].as_py()) if kind == "item" else f"one {kind}"
        raise DataError(
            f"{len(twice):,} rows of the {kind}s repeat an id and a {VALID_FROM}; "
            f"the first is for {first} at {valid_from[twice[0]]}",
            allowed="allowed: one row per id and time",
            fix="keep one row per id and time",
        )
    is_newest = np.ones(len(ids), dtype=bool)
    is_newest[:-1] = ~same_id
    newest = table.filter(pa.array(is_newest))
    names = [name for name in table.column_names if name not in (kind, VALID_FROM)]
    versions = table.select([VALID_FROM, *names]).add_column(0, f"{kind}_id", pa.array(ids))
    return newest.drop_columns([VALID_FROM]), versions


def encode_if_string(column: pa.ChunkedArray) -> pa.Array:
    """Joins the chunks of a column. Returns a dictionary array for strings, and an integer array for integers."""
    return one_array(column) if pa.types.is_integer(column.type) else encode(column)


def _entities(kind: str, raw: pa.Array, ids: Any, counts: Any, first: pa.Array, last: pa.Array) -> pa.Table:
    columns = {kind: raw, f"{kind}_id": ids, "num_events": counts, "first_ms": first, "last_ms": last}
    return pa.table(columns)


def _with_attributes(table: pa.Table, kind: str, attributes: pa.Table) -> pa.Table:
    _check_reserved(kind, attributes)
    names = [name for name in attributes.column_names if name != kind]
    ids = numpy_column(table, f"{kind}_id")
    attribute_ids = ids_of(attributes[kind], kind)
    only = np.flatnonzero(~np.isin(attribute_ids, ids))
    nothing = pa.nulls(len(only), pa.int64())
    raw = encode_if_string(attributes[kind]).take(pa.array(only))
    extra = _entities(kind, raw, attribute_ids[only], np.zeros(len(only), dtype=np.int64), nothing, nothing)
    everyone = pa.concat_tables([table, extra]).unify_dictionaries().combine_chunks()
    by_id = np.argsort(numpy_column(everyone, f"{kind}_id"), kind="stable")
    everyone = everyone.take(pa.array(by_id))
    order = np.argsort(attribute_ids, kind="stable")
    all_ids = numpy_column(everyone, f"{kind}_id")
    place = np.clip(np.searchsorted(attribute_ids, all_ids, sorter=order), 0, max(len(order) - 1, 0))
    source = order[place] if len(order) else np.zeros(len(all_ids), dtype=np.int64)
    missing = attribute_ids[source] != all_ids if len(order) else np.ones(len(all_ids), dtype=bool)
    taken = attributes.select(names).combine_chunks().take(pa.array(source, mask=missing))
    for name in names:
        everyone = everyone.append_column(name, taken[name])
    return everyone


def _check_reserved(kind: str, attributes: pa.Table) -> None:
    clash = [name for name in attributes.column_names if name in RESERVED]
    if clash:
        raise DataError(
            f"the {kind}s file has a column named {clash[0]}",
            allowed=f"reserved by tackboard: {', '.join(RESERVED)}",
            fix=f"rename {clash[0]} in the file",
        )
