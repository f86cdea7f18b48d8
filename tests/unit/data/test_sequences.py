"""Runs of events as histories, and the held-out event."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.data.sequences import UserRanges, positive_from_last
from tackboard.data.source import load_sequences
from tackboard.features.column import differing_rows
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import standard_features


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=50)
def test_the_positive_event_before_the_last_ones_equals_a_plain_loop(users: list[list[bool]], number: int) -> None:
    """A user with fewer is cut at the first one, so that what will be tested is never trained on."""
    offsets = np.concatenate([[0], np.cumsum([len(user) for user in users])]).astype(np.int64)
    expected, ends = [], []
    for begin, user in zip(offsets.tolist(), users, strict=False):
        places = [begin + place for place, positive in enumerate(user) if positive]
        expected.append(places[max(0, len(places) - number)] if places else -1)
        ends.append(expected[-1] if places else begin + len(user))
    assert positive_from_last(offsets, np.concatenate(users), number).tolist() == expected
    cut = UserRanges.cut(
        user_ids=np.arange(len(users)), offsets=offsets, is_positive=np.concatenate(users), held_out=number
    )
    assert (cut.targets.tolist(), cut.train_ends.tolist()) == (expected, ends)
    trained = set(cut.training_events().tolist())
    for begin, user in zip(offsets.tolist(), users, strict=False):
        places = [begin + place for place, positive in enumerate(user) if positive]
        assert not trained & set(places[-number:])  # None of the last ones, and nothing after the first of them.
        assert not places or not trained & set(range(expected[offsets.tolist().index(begin)], begin + len(user)))


def test_nothing_is_held_out_with_zero() -> None:
    cut = UserRanges.cut(
        user_ids=np.array([4]), offsets=np.array([0, 3]), is_positive=np.ones(3, dtype=np.bool_), held_out=0
    )
    assert (cut.targets.tolist(), cut.train_ends.tolist()) == ([-1], [3])


def test_a_run_of_events_has_the_history_that_a_server_computes_of_it(tiny_dataset: Path) -> None:
    """Bit for bit; and a run is computed as if nothing came before it, whatever else is in the batch."""
    sequences = load_sequences(tiny_dataset, features=lambda vocabulary: standard_features(vocabulary, 8))
    executor = OnlineExecutor(sequences.source.features.plan)
    ends = sequences.offsets[1:]
    starts = np.maximum(sequences.offsets[:-1], ends - 8)
    starts[3] = ends[3]  # nothing at all
    starts[4] += 1
    together = sequences.histories(starts, ends - starts)
    assert len(together) == len(starts)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        run = np.arange(start, end)
        history = {name: column.take(run) for name, column in sequences.events.columns.items()}
        online = executor.compute(history=history)["history"]
        alone = sequences.histories(starts[row : row + 1], (ends - starts)[row : row + 1])
        for found in (alone, together.take(np.array([row]))):
            assert len(differing_rows(found, online)) == 0
        assert online.to_pylist()[0]["item"] == sequences.item_ids[run].tolist()
