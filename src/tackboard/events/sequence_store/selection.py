"""This module selects the events and columns of a user that a read asks for, and reads as few bytes as possible.

A read goes from the newest chunk to the oldest until it has enough events. It reads only the requested columns of a
chunk. It also reads time_ms if a bound of the time range lies inside the chunk, or if the buffer has late events (older
than an event in a chunk). It reads received_ms if `received_before_ms` excludes an event of the chunk. Decided: a read
is a generator that yields requests for bytes and gets the bytes by `send`. So an engine can fetch the bytes for many
users in one network call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import TypeAlias

import numpy as np

from tackboard.core.errors import UsageError
from tackboard.events.sequence_store.codec import (
    FIRST_MS,
    ID,
    LAST_MS,
    MAX_RECEIVED_MS,
    NUM_EVENTS,
    Head,
    decode_column,
)
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.merging import Blobs
from tackboard.events.sequence_store.values import Columns, Integers, Mask, Values, empty_column, join, num_rows, take

Request: TypeAlias = tuple[Sequence[str], Sequence[int]]
"""The names of columns and the ids of chunks that a read asks for."""
Reading: TypeAlias = Generator[Request, Blobs, dict[str, Values]]


@dataclasses.dataclass(frozen=True)
class Query:
    """The columns (`fields`) and conditions of a read. The read returns the user's events that meet all conditions."""

    fields: tuple[str, ...]
    last: int | None = None
    """Largest number of events to return. If more events meet the other conditions, the newest are returned."""
    since_ms: int | None = None
    """Return only events that happened at this time or later."""
    until_ms: int | None = None
    """Return only events that happened before this time."""
    received_before_ms: int | None = None
    """Return only events received before this time, because a request at this time could see only these events."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise UsageError(f"the last {self.last} events were asked for", allowed="allowed: 1 or more")

    def mask(self, times: Integers, received: Integers) -> Mask:
        """Marks the events that meet the conditions on times."""
        keep = np.ones(len(times), dtype=np.bool_)
        if self.since_ms is not None:
            keep &= times >= self.since_ms
        if self.until_ms is not None:
            keep &= times < self.until_ms
        if self.received_before_ms is not None:
            keep &= received < self.received_before_ms
        return keep


def select(head: Head, recent: Columns | None, query: Query, config: StoreConfig) -> Reading:
    """Yields requests for bytes; at the end, returns the events of one user that `query` asks for, oldest first."""
    kinds = config.columns
    if recent is not None:
        wanted = query.mask(recent["time_ms"].values, recent["received_ms"].values)
        recent = None if not wanted.any() else recent if wanted.all() else take(recent, wanted)
    is_late = recent is not None and int(recent["time_ms"].values[0]) < head.chunked_until_ms
    num_recent = 0 if recent is None else num_rows(recent)
    # If the buffer has late events, the newest `last` events may all be in chunks. So `last` events are read from the
    # chunks.
    num_wanted = None if query.last is None else query.last - (0 if is_late else num_recent)
    picked = yield from _pick(head, query, num_wanted, config)
    names = list(dict.fromkeys([*query.fields, *(["time_ms"] if is_late else [])]))
    parts: list[dict[str, Values]] = []
    if picked.ids:
        held = dict(picked.held)
        missing = [name for name in names if any((name, chunk) not in held for chunk in picked.ids)]
        if missing:
            blobs = yield missing, picked.ids
            held.update((key, decode_column(blob)) for key, blob in blobs.items())
        for chunk in picked.ids:
            part = {name: held[name, chunk] for name in names}
            mask = picked.masks.get(chunk)
            parts.append(part if mask is None else take(part, mask))
    if recent is not None:
        parts.append({name: recent[name] for name in names})
    if not parts:
        return {name: empty_column(kinds[name]) for name in query.fields}
    columns = join(parts)
    if is_late:
        columns = take(columns, np.argsort(columns["time_ms"].values, kind="stable"))
    if query.last is not None and num_rows(columns) > query.last:
        columns = take(columns, slice(-query.last, None))
    return {name: columns[name] for name in query.fields}


@dataclasses.dataclass
class _Picked:
    """The chunks that hold requested events, oldest first."""

    ids: list[int] = dataclasses.field(default_factory=list)
    masks: dict[int, Mask] = dataclasses.field(default_factory=dict)
    """Chunk → mask of its requested events. A chunk whose events are all requested has no entry."""
    held: dict[tuple[str, int], Values] = dataclasses.field(default_factory=dict)
    """(name of a column, chunk) → this column of the chunk, if it was read to choose the events."""


def _pick(head: Head, query: Query, num_wanted: int | None, config: StoreConfig) -> Generator[Request, Blobs, _Picked]:
    """Picks the newest chunks with `num_wanted` matches in all; without `num_wanted`, every chunk with a match."""
    picked = _Picked()
    hidden = max(0, head.num_events - config.max_events)
    starts = np.cumsum(head.chunks[:, NUM_EVENTS]) - head.chunks[:, NUM_EVENTS]
    found = 0
    for entry, start in zip(head.chunks[::-1].tolist(), starts[::-1].tolist(), strict=True):
        if num_wanted is not None and found >= num_wanted:
            break
        chunk, num_events = entry[ID], entry[NUM_EVENTS]
        if start + num_events <= hidden:
            break
        if query.since_ms is not None and entry[LAST_MS] < query.since_ms:
            break
        if query.until_ms is not None and entry[FIRST_MS] >= query.until_ms:
            continue
        mask = None
        needed = []
        if (query.since_ms is not None and entry[FIRST_MS] < query.since_ms) or (
            query.until_ms is not None and entry[LAST_MS] >= query.until_ms
        ):
            needed.append("time_ms")
        if query.received_before_ms is not None and entry[MAX_RECEIVED_MS] >= query.received_before_ms:
            needed.append("received_ms")
        if needed:
            blobs = yield needed, [chunk]
            columns = {name: decode_column(blobs[name, chunk]) for name in needed}
            picked.held.update(((name, chunk), column) for name, column in columns.items())
            times = columns["time_ms"].values if "time_ms" in columns else np.full(num_events, entry[LAST_MS])
            received = columns["received_ms"].values if "received_ms" in columns else np.full(num_events, -1)
            # If time_ms was not read, all times of the chunk are in the range, so one of them can stand for all.
            mask = query.mask(times, received)
        if start < hidden:
            mask = np.ones(num_events, dtype=np.bool_) if mask is None else mask
            mask[: hidden - start] = False
        num_found = num_events if mask is None else int(mask.sum())
        if num_found:
            picked.ids.insert(0, chunk)
            if mask is not None:
                picked.masks[chunk] = mask
        found += num_found
    return picked
