"""Corrects a store from a dataset snapshot, so that the store's sequences agree with the log.

The horizon is the largest received_ms of the snapshot. Events that the store received before the horizon are replaced
by the events of the snapshot. Events that the store received at the horizon or later stay, except duplicates of events
in the snapshot. The change of each user is all or nothing. Only a few users are changed at a time, so other writers
wait only briefly. A second correction from the same snapshot changes nothing. After a kill, the next call continues
with the users that were not corrected yet.

Decided: events that the store received in the same millisecond as the horizon stay. A log often ends in the middle of
this millisecond, and an acknowledged event must not be lost because the log lacks it. Forgotten users stay forgotten.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq

from tackboard.core.files import reach
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column
from tackboard.events.sequence_store.batch import check_has_columns, columns_from_arrow
from tackboard.events.sequence_store.interface import Edit, SequenceStore, in_steps
from tackboard.events.sequence_store.merging import Change, State, all_columns, merge_columns, replace_change
from tackboard.events.sequence_store.values import Columns, Integers, Values, num_rows, same_columns, take

USERS_PER_READ = 64
NOTE = "correction"
Counts = dict[str, Counter[str]]
"""Maps each action to its numbers of `missing`, `extra` and `different` events."""


@dataclasses.dataclass
class Correction:
    """The changes that `correct` made, or the changes that `compare` found to be needed."""

    horizon_ms: int
    num_users: int = 0
    """Number of users that this call checked. Users that an earlier, killed call has corrected are not counted."""
    num_changed_users: int = 0
    actions: Counts = dataclasses.field(default_factory=dict)
    """Counts for each action: `missing` events are only in the snapshot, `extra` events only in the store. `different`
    events have the same time, item and action in both, but differ in another value."""

    def total(self, kind: str) -> int:
        """Returns the number of `missing`, `extra` or `different` events of all actions together."""
        return sum(counts[kind] for counts in self.actions.values())

    def add(self, found: Counts) -> None:
        """Adds the findings of one user."""
        self.num_users += 1
        self.num_changed_users += bool(found)
        for action, counts in found.items():
            self.actions.setdefault(action, Counter()).update(counts)


def correct(store: SequenceStore, dataset: Dataset) -> Correction:
    """Corrects the store from a snapshot; returns the corrected differences. After a kill, the next call continues."""
    horizon = horizon_ms(dataset)
    report = Correction(horizon)
    key = {"snapshot": dataset.path.name, "horizon_ms": horizon}
    note = json.loads(store.note(NOTE) or "{}")
    done = note.pop("done", None)
    start = done if note == key else None
    for users, events, last in _pieces(store, dataset, after=start, is_changing=True):
        found: dict[int, Counts] = {}
        store.edit(users, _setting_right(store, events, horizon, found))
        for counts in found.values():
            report.add(counts)
        reach("correction:before-note")
        store.set_note(NOTE, json.dumps({**key, "done": last}))
        reach("correction:after-note")
    store.set_note(NOTE, None)
    return report


def _setting_right(store: SequenceStore, events: dict[int, Columns], horizon: int, found: dict[int, Counts]) -> Edit:
    """Returns a function that corrects a user and writes the differences that it corrects to `found`."""

    def edit(user_id: int, state: State) -> Change | None:
        held = all_columns(state, store.config)
        wanted = _wanted(store, user_id, held, events.get(user_id), horizon)
        found[user_id] = _differences(store, held, wanted)
        return None if _is_same(held, wanted) else replace_change(state, wanted, store.config)

    return edit


def compare(store: SequenceStore, dataset: Dataset) -> Correction:
    """Returns the differences that `correct` would find. Nothing is changed, and no other client has to wait."""
    report = Correction(horizon_ms(dataset))
    for users, events, _ in _pieces(store, dataset, after=None, is_changing=False):
        for step in in_steps(users, USERS_PER_READ):
            for user, columns in zip(step, store.held(step), strict=True):
                held = columns if num_rows(columns) else None
                wanted = _wanted(store, user, held, events.get(user), report.horizon_ms)
                report.add(_differences(store, held, wanted))
    return report


def horizon_ms(dataset: Dataset) -> int:
    """Returns the largest received_ms of a snapshot."""
    pieces = dataset.event_chunks(["received_ms"])
    return max(int(numpy_column(piece, "received_ms").max()) for piece in pieces)


def _pieces(
    store: SequenceStore, dataset: Dataset, *, after: int | None, is_changing: bool
) -> Iterator[tuple[Integers, dict[int, Columns], int]]:
    """Yields all users of the snapshot and the store in order of their ids, in pieces.

    A piece is (users, the snapshot's events by user, last user of the piece). Users up to `after` are left out.
    """
    check_has_columns(pq.read_schema(dataset.events_path).names, store.config)
    held = store.user_ids()
    if after is not None:
        held = held[held > after]
    for piece in dataset.event_chunks(list(store.config.columns)):
        owners = numpy_column(piece, "user_id")
        if after is not None:
            start = int(np.searchsorted(owners, after, side="right"))
            piece, owners = piece.slice(start), owners[start:]
        if not len(owners):
            continue
        columns = store.coded(columns_from_arrow(piece, store.config), is_changing=is_changing)
        users, starts = np.unique(owners, return_index=True)
        bounds = [*starts.tolist(), len(owners)]
        events: dict[int, Columns] = {
            int(user): take(columns, slice(bounds[row], bounds[row + 1])) for row, user in enumerate(users.tolist())
        }
        last = int(users[-1])
        num_before = int(np.searchsorted(held, last, side="right"))
        yield np.union1d(users, held[:num_before]), events, last
        held = held[num_before:]
    if len(held):
        yield held, {}, int(held[-1])


def _wanted(
    store: SequenceStore, user_id: int, held: Columns | None, snapshot: Columns | None, horizon: int
) -> dict[str, Values] | None:
    """Returns the events of a user that the store should have."""
    parts = []
    if snapshot is not None:
        forgotten = store.forgotten_ms([user_id]).get(user_id)
        if forgotten is not None:
            snapshot = take(snapshot, snapshot["received_ms"].values >= forgotten)
        parts.append({name: snapshot[name] for name in store.config.columns})
    if held is not None:
        parts.append(take(held, held["received_ms"].values >= horizon))
    parts = [part for part in parts if num_rows(part)]
    if not parts:
        return None
    columns, _ = merge_columns(parts, store.codec)
    return take(columns, slice(-store.config.max_events, None))


def _is_same(held: Columns | None, wanted: Columns | None) -> bool:
    if held is None or wanted is None:
        return held is None and wanted is None
    return same_columns(held, wanted)


def _differences(store: SequenceStore, held: Columns | None, wanted: Columns | None) -> Counts:
    """Counts the missing, extra and different events of a user, by action. The result is empty if there are none."""
    if _is_same(held, wanted):
        return {}
    ours, theirs = _events(store, held), _events(store, wanted)
    missing = Counter(theirs[key][:3] for key in theirs.keys() - ours.keys())
    extra = Counter(ours[key][:3] for key in ours.keys() - theirs.keys())
    # A missing and an extra event with the same time, item and action count as one event with different values. An
    # event that differs only in its received time also counts as different.
    different = missing & extra
    moved = Counter(ours[key][:3] for key in ours.keys() & theirs.keys() if ours[key] != theirs[key])
    found: Counts = {}
    for kind, events in (
        ("missing", missing - different),
        ("extra", extra - different),
        ("different", different + moved),
    ):
        for (_, _, action), count in events.items():
            found.setdefault(store.name_of("action", action), Counter())[kind] += count
    return found


def _events(store: SequenceStore, columns: Columns | None) -> dict[tuple[int, bytes], tuple[int, int, int, int]]:
    """Returns events as a map from (time, packed event without its times) to (time, item, action, received)."""
    if columns is None:
        return {}
    lists = [columns[name].values.tolist() for name in ("time_ms", "item_id", "action", "received_ms")]
    return dict(zip(zip(lists[0], store.codec.pack(columns), strict=True), zip(*lists, strict=True), strict=True))
