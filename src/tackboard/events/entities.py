"""The items and users that events speak of: completed events and optional attributes in, one row per id out.

Decided: an id that only the attribute table knows is kept with num_events 0, because a new item must be rankable
before anybody touched it. Attributes that change with time are rows with a valid_from_ms: the newest counts here,
all of them are kept in a table of versions.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tackboard.core.errors import DataError
from tackboard.events.schema import encode, ids_of, numpy_column
from tackboard.events.vectors import with_vectors

RESERVED = ("first_ms", "last_ms", "num_events", "item_id", "user_id")
VALID_FROM = "valid_from_ms"
"""Column of an attribute table that says from when, in ms UTC, a row holds."""


def entity_table(events: pa.Table, kind: str, attributes: pa.Table | None = None) -> pa.Table:
    """One row per `kind` (`item` or `user`), sorted by id: raw value, id, num_events, first_ms, last_ms, attributes.

    `attributes` has a column named `kind` of the events' type and distinct values; its other columns are taken over.
    first_ms and last_ms are null without events.
    """
    id_column, time_ms = numpy_column(events, f"{kind}_id"), numpy_column(events, "time_ms")
    # Not a stable sort: of equal ids any row will do, and the unstable one is several times faster.
    order = np.argsort(id_column)
    ids = id_column[order]
    start = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)
    ids = ids[start]
    times = time_ms[order]
    first = np.minimum.reduceat(times, start) if len(ids) else np.zeros(0, dtype=np.int64)
    last = np.maximum.reduceat(times, start) if len(ids) else np.zeros(0, dtype=np.int64)
    raw = encode_if_string(events[kind]).take(pa.array(order[start]))
    counts = np.diff(np.append(start, len(order)))
    columns = {
        kind: raw,
        f"{kind}_id": pa.array(ids),
        "num_events": pa.array(counts.astype(np.int64)),
        "first_ms": pa.array(first),
        "last_ms": pa.array(last),
    }
    table = pa.table(columns)
    return table if attributes is None else _with_attributes(table, kind, attributes)


def split_versions(kind: str, attributes: pa.Table | None) -> tuple[pa.Table | None, pa.Table | None]:
    """The newest attributes of each id, and all versions, or None where `attributes` has no valid_from_ms.

    Versions: the id column, valid_from_ms and the attributes, sorted by the first two. In both, lists of floats that
    have one length are vectors. Two rows with one id and one time, a row without a time or times of another type raise
    DataError.
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
        raise DataError(f"{attributes[VALID_FROM].null_count} rows of the {kind}s have no {VALID_FROM}")
    ids, valid_from = ids_of(attributes[kind], kind), numpy_column(attributes, VALID_FROM)
    order = np.lexsort((valid_from, ids))
    ids, valid_from = ids[order], valid_from[order]
    same_id = ids[1:] == ids[:-1]
    twice = np.flatnonzero(same_id & (valid_from[1:] == valid_from[:-1]))
    table = attributes.combine_chunks().take(pa.array(order))
    if len(twice):
        # Raw ids of users stay out of messages.
        first = repr(table[kind][int(twice[0])].as_py()) if kind == "item" else f"one {kind}"
        raise DataError(
            f"{len(twice):,} rows of the {kind}s repeat an id and a {VALID_FROM}: "
            f"{first} at {valid_from[twice[0]]} is the first",
            allowed="allowed: one row per id and time",
            fix="keep one row of each",
        )
    is_newest = np.ones(len(ids), dtype=bool)
    is_newest[:-1] = ~same_id
    newest = table.filter(pa.array(is_newest))
    names = [name for name in table.column_names if name not in (kind, VALID_FROM)]
    versions = table.select([VALID_FROM, *names]).add_column(0, f"{kind}_id", pa.array(ids))
    return newest.drop_columns([VALID_FROM]), versions


def encode_if_string(column: pa.ChunkedArray) -> pa.Array:
    """A string column as one dictionary array, an integer column as one integer array."""
    if pa.types.is_integer(column.type):
        array = column.combine_chunks()
        return array if isinstance(array, pa.Array) else array.chunk(0)
    return encode(column)


def _with_attributes(table: pa.Table, kind: str, attributes: pa.Table) -> pa.Table:
    _check_reserved(kind, attributes)
    names = [name for name in attributes.column_names if name != kind]
    ids = numpy_column(table, f"{kind}_id")
    attribute_ids = ids_of(attributes[kind], kind)
    only = np.flatnonzero(~np.isin(attribute_ids, ids))
    nothing = pa.nulls(len(only), pa.int64())
    extra = pa.table(
        {
            kind: encode_if_string(attributes[kind]).take(pa.array(only)),
            f"{kind}_id": pa.array(attribute_ids[only]),
            "num_events": pa.array(np.zeros(len(only), dtype=np.int64)),
            "first_ms": nothing,
            "last_ms": nothing,
        }
    )
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
            allowed=f"taken by tackboard: {', '.join(RESERVED)}",
            fix=f"rename {clash[0]} in the file",
        )
