"""This module takes a user's stored and new events, and returns what to write and what to delete.

A user's sequence has chunks and a buffer. Chunks are in order of time and do not overlap; the buffer holds recently
appended events of any time. New events go into the buffer. A full buffer is merged with the chunks that end at or after
the buffer's oldest event. If the buffered events are only minutes late, there is usually one such chunk. Decided:
events with equal times keep their order of arrival. A duplicate is an event that equals another event in everything but
received_ms. If a user has more than `max_events` events (the cap), the oldest events are beyond the cap. Readers skip
these events, and the next merge deletes every chunk whose events are all beyond the cap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tackboard.events.sequence_store.codec import (
    FIRST_MS,
    ID,
    LAST_MS,
    NUM_EVENTS,
    Head,
    RowCodec,
    decode_column,
    encode_column,
)
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.values import Columns, Integers, Mask, Values, join, num_rows, take

Blobs = Mapping[tuple[str, int], bytes]
"""Maps (name of a column, id of a chunk) to the bytes of this column in this chunk."""
Load = Callable[[Sequence[str], Sequence[int]], Blobs]
"""A function that takes names of columns and ids of chunks, and reads these columns of these chunks."""
RecentRow = tuple[int, bytes, int, int]
"""A buffered event as a tuple: time_ms, the packed event without its times, received_ms, and the arrival number."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """A user's stored events: the head, the buffer, and a function that reads chunks."""

    head: Head
    recent: Columns | None
    """The buffered events, sorted by (time, arrival); None if the buffer is empty."""
    load: Load


@dataclasses.dataclass(slots=True)
class Change:
    """The changes to write for a user."""

    head: Head
    add_recent: Sequence[RecentRow] = ()
    clear_recent: bool = False
    """Whether to delete every buffered event before `add_recent` is added."""
    put: dict[tuple[str, int], bytes] = dataclasses.field(default_factory=dict)
    drop_chunks: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the user has no events after the change."""
        return self.head.num_events == 0


def recent_columns(rows: Sequence[RecentRow], codec: RowCodec) -> dict[str, Values] | None:
    """Returns buffered events as columns, sorted by (time, arrival); None if there are no events."""
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: (row[0], row[3]))
    columns = codec.unpack([row[1] for row in rows])
    columns["time_ms"] = Values(np.array([row[0] for row in rows], dtype=np.int64))
    columns["received_ms"] = Values(np.array([row[2] for row in rows], dtype=np.int64))
    return columns


def append_change(state: State, new: Columns, config: StoreConfig, codec: RowCodec) -> tuple[Change | None, int]:
    """Returns the change that appends `new` (events in the order of their arrival), and the number of duplicates.

    The change is None if all events are duplicates.
    """
    buffered = _buffer(state, new, config, codec)
    if buffered is not None:
        return buffered
    return _merge(state, new, config, codec)


def replace_change(state: State, columns: Columns | None, config: StoreConfig) -> Change:
    """Returns the change that replaces a user's events by `columns`, which must be sorted and without duplicates."""
    old = state.head
    drop = [int(chunk) for chunk in old.chunks[:, ID]]
    head = Head(next_arrival=old.next_arrival, next_chunk=old.next_chunk)
    if columns is None or not num_rows(columns):
        return Change(head, clear_recent=True, drop_chunks=drop)
    head, put = _chunked(head, take(columns, slice(-config.max_events, None)), config)
    return Change(head, clear_recent=True, put=put, drop_chunks=drop)


def all_columns(state: State, config: StoreConfig) -> dict[str, Values] | None:
    """Returns all events of the user within the cap, in order of time; None if the user has no events."""
    parts = _chunk_columns(state, range(len(state.head.chunks)), config)
    if state.recent is not None:
        parts.append({name: state.recent[name] for name in config.columns})
    if not parts:
        return None
    columns = join(parts)
    ordered = take(columns, np.argsort(columns["time_ms"].values, kind="stable"))
    return take(ordered, slice(-config.max_events, None))


def merge_columns(parts: Sequence[Columns], codec: RowCodec) -> tuple[dict[str, Values], int]:
    """Joins the parts, sorts the events by time and drops duplicates. Returns the events and the number of duplicates.

    If several events are equal, the first of them is kept.
    """
    columns = join(parts)
    times = columns["time_ms"].values
    if (times[1:] < times[:-1]).any():
        columns = take(columns, np.argsort(times, kind="stable"))
    duplicate = duplicates(columns, codec)
    num_dropped = int(duplicate.sum())
    return (take(columns, ~duplicate) if num_dropped else columns), num_dropped


def duplicates(columns: Columns, codec: RowCodec) -> Mask:
    """Marks each event that equals an earlier event in everything but received_ms. `columns` are sorted by time."""
    times = columns["time_ms"].values
    found = np.zeros(len(times), dtype=np.bool_)
    same = times[1:] == times[:-1]
    if not same.any():
        return found
    # Only events with the same time can be equal, and few events share a time.
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    seen: set[tuple[int, bytes]] = set()
    for place, key in zip(
        tied.tolist(), zip(times[tied].tolist(), codec.pack(take(columns, tied)), strict=True), strict=True
    ):
        found[place] = key in seen
        seen.add(key)
    return found


def _buffer(state: State, new: Columns, config: StoreConfig, codec: RowCodec) -> tuple[Change | None, int] | None:
    """Does the work of `append_change` if `new` fits into the buffer. Returns None if chunks must be merged."""
    head, times = state.head, new["time_ms"].values
    if not fits_buffer(head, state.load, times, config):
        return None
    known = set()
    if state.recent is not None:
        known = set(zip(state.recent["time_ms"].values.tolist(), codec.pack(state.recent), strict=True))
    rows: list[RecentRow] = []
    num_late = 0
    late = times < head.chunked_until_ms
    received = new["received_ms"].values.tolist()
    for number, key in enumerate(zip(times.tolist(), codec.pack(new), strict=True)):
        if key not in known:
            known.add(key)
            rows.append((*key, received[number], head.next_arrival + len(rows)))
            num_late += bool(late[number])
    if not rows:
        return None, len(times)
    changed = dataclasses.replace(
        head,
        num_recent=head.num_recent + len(rows),
        num_late=head.num_late + num_late,
        next_arrival=head.next_arrival + len(rows),
    )
    return Change(changed, add_recent=rows), len(times) - len(rows)


def fits_buffer(head: Head, load: Load, times: Integers, config: StoreConfig) -> bool:
    """Returns whether events with these times can go into the buffer without a merge.

    The buffer must have room, and no event in a chunk may have one of these times. A late event is older than an event
    in a chunk. If the user would have more events than the cap, the buffer may hold no late events. The reason: readers
    skip events beyond the cap only in the oldest chunks, not in the buffer.
    """
    oldest, until = int(times.min()), head.chunked_until_ms
    if head.num_recent + len(times) > config.recent_limit:
        return False
    if (head.num_late or oldest < until) and head.num_events + len(times) > config.max_events:
        return False
    return oldest > until or not times_in_chunks(head, load, times)


def times_in_chunks(head: Head, load: Load, times: Integers) -> bool:
    """Returns whether an event in a chunk has one of these times. If so, a new event may be a duplicate."""
    touched = [
        int(chunk[ID]) for chunk in head.chunks if ((times >= chunk[FIRST_MS]) & (times <= chunk[LAST_MS])).any()
    ]
    for blob in load(["time_ms"], touched).values() if touched else ():
        held = decode_column(blob).values
        if (held.take(np.searchsorted(held, times), mode="clip") == times).any():
            return True
    return False


def _merge(state: State, new: Columns, config: StoreConfig, codec: RowCodec) -> tuple[Change | None, int]:
    """Merges the buffer and `new` with the chunks that end at or after the oldest buffered or new event."""
    head, chunks = state.head, state.head.chunks
    oldest = int(new["time_ms"].values.min())
    if state.recent is not None:
        oldest = min(oldest, int(state.recent["time_ms"].values[0]))
    first = int(np.searchsorted(chunks[:, LAST_MS], oldest))
    if first == len(chunks) and first and chunks[-1, NUM_EVENTS] < config.chunk_events:
        first -= 1  # The last chunk is filled up before a new chunk begins.
    parts = _chunk_columns(state, range(first, len(chunks)), config)
    if state.recent is not None:
        parts.append({name: state.recent[name] for name in config.columns})
    num_before = sum(num_rows(part) for part in parts)
    parts.append({name: new[name] for name in config.columns})
    columns, num_duplicates = merge_columns(parts, codec)
    if num_rows(columns) == num_before:
        return None, num_duplicates
    dropped = [int(chunk) for chunk in chunks[first:, ID]]
    columns = take(columns, slice(-config.max_events, None))
    kept = chunks[:first]
    excess = int(kept[:, NUM_EVENTS].sum()) + num_rows(columns) - config.max_events
    num_gone = int(np.searchsorted(np.cumsum(kept[:, NUM_EVENTS]), excess, side="right")) if excess > 0 else 0
    dropped += [int(chunk) for chunk in kept[:num_gone, ID]]
    base = Head(next_arrival=head.next_arrival, next_chunk=head.next_chunk, chunks=kept[num_gone:])
    changed, put = _chunked(base, columns, config)
    return Change(changed, clear_recent=True, put=put, drop_chunks=dropped), num_duplicates


def _chunked(head: Head, columns: Columns, config: StoreConfig) -> tuple[Head, dict[tuple[str, int], bytes]]:
    """Splits `columns` into chunks; returns `head` with these chunks added at the end, and the bytes of the chunks."""
    put: dict[tuple[str, int], bytes] = {}
    entries = []
    chunk = head.next_chunk
    for start in range(0, num_rows(columns), config.chunk_events):
        part = take(columns, slice(start, start + config.chunk_events))
        times = part["time_ms"].values
        entries.append((chunk, len(times), times[0], times[-1], part["received_ms"].values.max()))
        for name, kind in config.columns.items():
            put[name, chunk] = encode_column(kind, part[name])
        chunk += 1
    chunks = np.concatenate([head.chunks, np.array(entries, dtype=np.int64)])
    return dataclasses.replace(head, next_chunk=chunk, chunks=chunks), put


def _chunk_columns(state: State, places: Sequence[int], config: StoreConfig) -> list[dict[str, Values]]:
    """Reads every column of the chunks at the positions `places` in the user's list of chunks."""
    ids = [int(state.head.chunks[place, ID]) for place in places]
    blobs = state.load(list(config.columns), ids) if ids else {}
    return [{name: decode_column(blobs[name, chunk]) for name in config.columns} for chunk in ids]
