"""Counts in a window: a plain count of what was known strictly before an instant, in whatever order instants come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation.live_counts import LiveCounts


def plain_counts(sequences: Sequences, time_ms: int, length_ms: int) -> list[int]:
    counts = dict.fromkeys(sequences.catalogue.tolist(), 0)
    events = sequences.events
    for item, positive, time, received in zip(
        sequences.item_ids.tolist(), sequences.is_positive, events.times, events.received, strict=True
    ):
        if positive and time_ms - length_ms <= max(time, received) < time_ms:
            counts[item] += 1
    return list(counts.values())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("hours", [1, 7, 1000])
def test_counts_equal_a_plain_count(by_time: Callable[..., Sequences], seed: int, hours: int) -> None:
    sequences = by_time(seed)
    times = np.unique(sequences.events.times)
    instants = np.unique(np.concatenate([times, times + 1, [times[0] - HOUR_MS, times[-1] + 50 * HOUR_MS]]))
    jumps = np.random.default_rng(seed).permutation(instants)
    for order in (instants, instants[::-1], np.repeat(instants[::5], 3), jumps):
        window = LiveCounts.of(sequences).window(hours * HOUR_MS)
        for instant in order.tolist():
            assert window.at(instant).tolist() == plain_counts(sequences, instant, hours * HOUR_MS)
    assert window.at(int(instants[-1]) + 2000 * HOUR_MS).sum() == 0


def test_received_late_counts_from_then_on_without_a_cut_too(last_out: Callable[[int], Sequences]) -> None:
    """A model that reads no times has them read for its evaluation nevertheless."""
    sequences = last_out(3)
    assert (sequences.events.received > sequences.events.times).sum() > 10
    window = LiveCounts.of(sequences).window(10 * HOUR_MS)
    for instant in np.unique(sequences.events.received).tolist():
        assert window.at(instant).tolist() == plain_counts(sequences, instant, 10 * HOUR_MS)
