"""Coverage, novelty and repeats, by hand; places without an item count nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from tackboard.metrics.top_lists import coverage, novelty, repeat_share

TOP = np.array([[0, 2], [2, -1]])
EMPTY = np.zeros((0, 10), dtype=np.int64)


def test_coverage_counts_each_item_once() -> None:
    assert coverage(TOP, 4) == 0.5
    assert coverage(np.array([[0, 1], [2, 3]]), 4) == 1.0
    assert coverage(EMPTY, 0) == coverage(np.array([[-1]]), 3) == 0.0


def test_novelty_is_the_mean_number_of_bits() -> None:
    """Item 0 has 8 of 16 events (1 bit), item 2 has none and counts as half an event (5 bits)."""
    counts = np.array([8, 8, 0])
    assert novelty(TOP, counts) == pytest.approx((1 + 5 + 5) / 3)
    assert novelty(EMPTY, counts) == 0.0
    assert novelty(TOP, np.zeros(3, dtype=np.int64)) == pytest.approx(1.0)


def test_repeats_are_a_share_of_the_items_in_the_lists() -> None:
    assert repeat_share(TOP, np.array([[True, False], [True, False]])) == pytest.approx(2 / 3)
    assert repeat_share(EMPTY, np.zeros((0, 10), dtype=bool)) == repeat_share(np.array([[-1]]), np.array([[True]])) == 0
