"""The mixing ratios: 1 for a full permutation, and what can be worked out for the rest."""

import numpy as np
import pytest

from tackboard.bench.loader.mixing import SEGMENTS_PER_STEP, measure_mixing, order_of, ratios


def test_every_segment_once() -> None:
    for window in (1, 3, 8):
        assert np.array_equal(np.sort(order_of(window, 8, 200, seed=1)), np.arange(1_600))


def test_ratios_of_windows() -> None:
    found = measure_mixing((1, 4), num_buckets=32, segments_per_bucket=480, num_orders=4)["windows"]
    assert list(found) == ["1", "4", "32"]
    assert found["32"]["spread"] == pytest.approx(1, abs=0.25)
    assert found["32"]["neighbours"] == pytest.approx(1, abs=0.05)
    # Two of a bucket meet as often as in a dataset of the window's size.
    assert found["4"]["neighbours"] == pytest.approx(8, rel=0.05)
    assert found["1"]["spread"] > 2 * found["4"]["spread"] > 4


def test_no_mixing_at_all() -> None:
    found = ratios(np.arange(SEGMENTS_PER_STEP * 50), SEGMENTS_PER_STEP)
    assert found["spread"] > 90
    assert found["neighbours"] == pytest.approx(50, rel=0.02)
