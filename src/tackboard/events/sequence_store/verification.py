"""Reads and checks everything in a store; returns counts, or raises CorruptFileError with the first damaged place.

The engine (SQLite or Redis) checks its own data. The seal (checksum) of every block is checked when the block is read,
and every chunk is compared with its entry in the list of chunks. Readers and writers can continue meanwhile. A store of
version 1 has no seals, so damage is found in it only if values contradict each other.
"""

from __future__ import annotations

import dataclasses

from tackboard.core.errors import CorruptFileError
from tackboard.events.sequence_store.codec import FIRST_MS, ID, LAST_MS, MAX_RECEIVED_MS, NUM_EVENTS, decode_column
from tackboard.events.sequence_store.interface import NAMED, SequenceStore
from tackboard.events.sequence_store.merging import State
from tackboard.events.sequence_store.sealing import head_place


@dataclasses.dataclass
class Verified:
    """The numbers of users, events and other parts that were found in an intact store."""

    format_version: int
    has_checksums: bool
    num_users: int = 0
    num_events: int = 0
    """Number of events in chunks and buffers, including events beyond the cap (`max_events`) that still exist."""
    num_columns: int = 0
    """Number of columns in all chunks. Each column of a chunk has its own checksum."""
    num_names: int = 0
    num_forgotten_users: int = 0


def verify_store(store: SequenceStore) -> Verified:
    """Reads and checks a whole store."""
    report = Verified(store.seals.version, store.seals.has_seals)
    report.num_forgotten_users = store.check_engine()
    report.num_names = sum(len(store.read_names(kind)) for kind in NAMED)
    users = store.user_ids()
    errors: list[CorruptFileError] = []
    empty: list[int] = []

    def look(user_id: int, state: State) -> None:
        if state.head.num_events == 0:
            empty.append(user_id)
            return
        num_columns = check_user(store, user_id, state)
        report.num_users += 1
        report.num_events += state.head.num_events
        report.num_columns += num_columns

    for user in users.tolist():
        try:
            store.look([user], look)
        except CorruptFileError as error:
            errors.append(error)
    # A listed user without events is damage, unless the user was forgotten meanwhile and is not listed any more.
    lost = set(empty) & set(store.user_ids().tolist()) if empty else set()
    errors += [store.seals.damaged(head_place(user), "is missing") for user in sorted(lost)]
    if errors:
        more = f"; {len(errors)} of {len(users)} users are damaged" if len(errors) > 1 else ""
        raise CorruptFileError(errors[0].got + more, fix="restore the store, or make it again from the log")
    return report


def check_user(store: SequenceStore, user_id: int, state: State) -> int:
    """Compares every chunk of a user with its entry in the head; returns the number of columns in all chunks."""
    kinds = store.config.columns
    before = -1
    if state.recent is not None:
        store.named(state.recent)
    for entry in state.head.chunks.tolist():
        chunk = entry[ID]
        columns = {name: decode_column(blob) for (name, _), blob in state.load(list(kinds), [chunk]).items()}
        times, received = columns["time_ms"].values, columns["received_ms"].values
        is_right = (
            all(len(column) == entry[NUM_EVENTS] > 0 for column in columns.values())
            and (int(times[0]), int(times[-1])) == (entry[FIRST_MS], entry[LAST_MS])
            and int(received.max()) == entry[MAX_RECEIVED_MS]
            and before <= entry[FIRST_MS]
            and bool((times[1:] >= times[:-1]).all())
        )
        if not is_right:
            raise store.seals.damaged(head_place(user_id), f"contradicts chunk {chunk}")
        store.named(columns)
        before = entry[LAST_MS]
    return len(state.head.chunks) * len(kinds)
