"""The events that are judged, compared with plain loops over the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.core.errors import DataError
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.data.time_split import HOUR_MS, TimeSplit
from tackboard.evaluation.judged_events import (
    JUDGED,
    JudgedEvents,
    events_between,
    first_seen,
    held_out_events,
    judged_events,
)

ByTime = Callable[..., Sequences]


def split_of(sequences: Sequences) -> TimeSplit:
    assert sequences.source.time_split is not None
    return sequences.source.time_split


def positive_events(sequences: Sequences, begin_ms: int, end_ms: float = float("inf")) -> dict[int, list[int]]:
    """User → events, in their order, by a plain loop."""
    found: dict[int, list[int]] = {}
    for user, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        for event in range(begin, end):
            if sequences.is_positive[event] and begin_ms <= sequences.events.times[event] < end_ms:
                found.setdefault(user, []).append(event)
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("judged", JUDGED)
def test_first_last_and_all_events_after_the_cut(by_time: ByTime, seed: int, judged: str) -> None:
    sequences = by_time(seed)
    found = judged_events(sequences, judged)  # type: ignore[arg-type]
    chosen = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[judged]
    after = positive_events(sequences, split_of(sequences).cut_ms)
    expected = {(user, event) for user, events in after.items() for event in events[chosen]}
    assert set(zip(found.users.tolist(), found.events.tolist(), strict=True)) == expected
    assert len(found) == len(expected) > 10
    times = sequences.events.times[found.events]
    assert (np.diff(times) >= 0).all() and times.min() >= split_of(sequences).cut_ms
    # Some users have no event before the cut, and some none after it.
    assert set(found.users) & set(np.flatnonzero(sequences.train_ends == sequences.offsets[:-1]))
    assert len(set(found.users)) < len(sequences.user_ids) - 3


def test_events_between_two_instants(by_time: ByTime) -> None:
    sequences = by_time(4)
    cut_ms = split_of(sequences).cut_ms
    for begin_ms, end_ms in ((cut_ms - 20 * HOUR_MS, cut_ms), (cut_ms, cut_ms + HOUR_MS), (cut_ms, cut_ms)):
        found = events_between(sequences, begin_ms, end_ms)
        expected = positive_events(sequences, begin_ms, end_ms)
        assert sorted(found.events.tolist()) == sorted(event for events in expected.values() for event in events)
    assert len(found) == 0 and len(events_between(sequences, cut_ms, cut_ms, "first")) == 0


def test_items_lengths_and_parts(by_time: ByTime) -> None:
    sequences = by_time(5)
    found = judged_events(sequences, "all")
    for place in range(len(found)):
        event, user = int(found.events[place]), int(found.users[place])
        assert sequences.catalogue[found.items(sequences)[place]] == sequences.item_ids[event]
        assert found.lengths(sequences)[place] == event - sequences.offsets[user]
    part = found.take(np.array([3, 1]))
    assert part.events.tolist() == found.events[[3, 1]].tolist() and len(found.take(slice(2, 5))) == 3


def test_leave_last_out_judges_the_held_out_events(last_out: Callable[[int], Sequences]) -> None:
    sequences = last_out(6)
    found = held_out_events(sequences)
    expected = {
        user: events[-1]
        for user, events in positive_events(sequences, 0).items()
        if events[-1] > sequences.offsets[user]
    }
    assert dict(zip(found.users.tolist(), found.events.tolist(), strict=True)) == expected
    for judged in JUDGED:  # the setting says nothing here
        assert judged_events(sequences, judged).events.tolist() == found.events.tolist()


def test_nothing_to_judge_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    log = [(1, 5, "click", "home", HOUR_MS), (1, 6, "click", "home", 2 * HOUR_MS), (2, 5, "hide", "home", 5 * HOUR_MS)]
    split = TimeSplit(until_ms=3 * HOUR_MS, cut_ms=3 * HOUR_MS)
    sequences = load_sequences(make_dataset(tmp_path, log), ("click",), time_split=lambda _dataset: split)
    with pytest.raises(DataError, match="no positive event to judge") as error:
        judged_events(sequences, "first")
    assert "data.cut = 1970-01-01T03:00:00" in str(error.value.allowed)


def test_an_item_appears_with_its_first_event(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Also if this event is a hide, was received late, or is not in the log at all."""
    import pyarrow as pa

    log = [(1, 5, "click", "home", 30), (1, 6, "hide", "home", 10), (2, 6, "click", "home", 40)]
    items = pa.table({"item": pa.array([5, 6, 7], type=pa.int64()), "size": [1, 2, 3]})
    dataset = make_dataset(tmp_path, log, received_ms=[50, 60, 40], item_attributes=items)
    sequences = load_sequences(dataset, ("click",))
    assert sequences.catalogue.tolist() == [5, 6, 7]
    assert first_seen(sequences).tolist() == [30, 10, np.iinfo(np.int64).max]


@pytest.mark.parametrize("seed", [7, 8])
def test_first_seen_equals_a_plain_loop(by_time: ByTime, seed: int) -> None:
    sequences = by_time(seed)
    expected = {item: sequences.events.times[sequences.item_ids == item].min() for item in sequences.catalogue}
    assert first_seen(sequences).tolist() == [expected[item] for item in sequences.catalogue]
    assert (first_seen(sequences) >= split_of(sequences).cut_ms).any()


def test_judged_events_are_whole_numbers(by_time: ByTime) -> None:
    found = judged_events(by_time(9), "all")
    assert {array.dtype for array in dataclasses.astuple(found)} == {np.dtype(np.int64)}
    assert isinstance(found.take(slice(0, 1)), JudgedEvents)
