from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sequence_model import SMALL, event

from tackboard.events.sequence_store.batch import columns_of
from tackboard.events.sequence_store.codec import ID, LAST_MS, NUM_EVENTS, Head, RowCodec
from tackboard.events.sequence_store.merging import (
    Change,
    RecentRow,
    State,
    all_columns,
    append_change,
    duplicates,
    merge_columns,
    recent_columns,
    replace_change,
)
from tackboard.events.sequence_store.values import Columns, Values

CODEC = RowCodec(SMALL.fields)


class User:
    """A user in memory, changed as an engine would."""

    def __init__(self) -> None:
        self.head = Head()
        self.rows: list[RecentRow] = []
        self.blobs: dict[tuple[str, int], bytes] = {}
        self.loaded: list[tuple[list[str], list[int]]] = []

    @property
    def state(self) -> State:
        return State(self.head, recent_columns(self.rows, CODEC), self.load)

    def load(self, names: Sequence[str], chunks: Sequence[int]) -> dict[tuple[str, int], bytes]:
        self.loaded.append((list(names), list(chunks)))
        return {(name, chunk): self.blobs[name, chunk] for name in names for chunk in chunks}

    def apply(self, change: Change | None) -> None:
        if change is None:
            return
        self.head = change.head
        self.rows = ([] if change.clear_recent else self.rows) + list(change.add_recent)
        self.blobs = {key: data for key, data in self.blobs.items() if key[1] not in change.drop_chunks}
        assert not self.blobs.keys() & change.put.keys(), "a number of a chunk came again"
        self.blobs |= change.put
        assert len(self.rows) == self.head.num_recent
        assert {chunk for _, chunk in self.blobs} == set(self.head.chunks[:, ID].tolist())

    def append(self, *times: int, item_id: int = 1) -> int:
        change, num_duplicates = append_change(self.state, coded(*times, item_id=item_id), SMALL, CODEC)
        self.apply(change)
        return num_duplicates

    @property
    def times(self) -> list[int]:
        columns = all_columns(self.state, SMALL)
        return [] if columns is None else columns["time_ms"].values.tolist()


def coded(*times: int, item_id: int = 1) -> Columns:
    columns = columns_of([event(time_ms, item_id) for time_ms in times], SMALL)
    for name in ("action", "surface"):
        columns[name] = Values(columns[name].values)
    return columns


def test_the_buffer_is_merged_when_it_is_full() -> None:
    user = User()
    for time_ms in range(7):
        user.append(time_ms)
    assert user.head.num_recent == 7 and not len(user.head.chunks)
    user.append(7)
    assert user.head.num_recent == 0 and user.head.chunks[:, NUM_EVENTS].tolist() == [8]
    for time_ms in range(8, 17):
        user.append(time_ms)
    # The last chunk is filled up first: 10, and the rest.
    assert user.head.chunks[:, NUM_EVENTS].tolist() == [10, 6]
    assert user.times == list(range(17))


def test_a_late_event_waits_in_the_buffer_and_reads_only_times() -> None:
    user = User()
    user.append(*range(0, 80, 2))
    user.loaded.clear()
    assert user.append(31) == 0
    assert (user.head.num_recent, user.head.num_late) == (1, 1)
    assert [names for names, _ in user.loaded] == [["time_ms"]] and len(user.loaded[0][1]) == 1
    assert user.times == sorted([*range(0, 80, 2), 31])


def test_a_merge_leaves_older_chunks_alone() -> None:
    user = User()
    user.append(*range(0, 80, 2))
    before = user.head.chunks[:, ID].tolist()
    user.append(*range(61, 61 + 9))
    after = user.head.chunks[:, ID].tolist()
    assert after[:3] == before[:3] and not set(after[3:]) & set(before)
    assert user.head.chunks[:3, LAST_MS].tolist() == [18, 38, 58]


def test_duplicates_are_found_in_buffer_and_chunks() -> None:
    user = User()
    user.append(*range(20))
    user.append(20)
    assert user.append(20) == 1
    assert user.append(5) == 1
    assert user.append(5, item_id=2) == 0
    assert user.append(5, 5, 6, item_id=2) == 2
    assert user.times == sorted([*range(21), 5, 6])


def test_whole_chunks_beyond_the_cap_are_deleted() -> None:
    user = User()
    for start in range(0, 300, 3):
        user.append(*range(start, start + 3))
        assert user.head.num_events <= 50 + 10 + 7
    assert user.times == list(range(250, 300))


def test_an_event_older_than_all_at_the_cap_does_not_stay() -> None:
    user = User()
    user.append(*range(100, 150))
    user.append(3)
    assert user.times == list(range(100, 150))


def test_replacing_and_emptying() -> None:
    user = User()
    user.append(*range(30))
    user.apply(replace_change(user.state, coded(5, 6), SMALL))
    assert user.times == [5, 6] and len(user.head.chunks) == 1
    change = replace_change(user.state, None, SMALL)
    assert change.is_empty
    user.apply(change)
    assert user.times == [] and not user.blobs


def test_merging_keeps_the_first_of_equals() -> None:
    first, second = coded(1, 2, 2), coded(2, 0)
    columns, num_dropped = merge_columns([first, second], CODEC)
    assert columns["time_ms"].values.tolist() == [0, 1, 2] and num_dropped == 2
    assert duplicates(coded(1, 1, 2, 3, 3, 3), CODEC).tolist() == [False, True, False, False, True, True]
    assert not np.any(duplicates(coded(1, 2, 3), CODEC))
