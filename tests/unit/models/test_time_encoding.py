"""Buckets of elapsed time equal their formulas at every boundary, on whole numbers and on floats."""

from __future__ import annotations

import math

import pytest
import torch

from tackboard.features.standard import GAP_BOUNDARIES_MS
from tackboard.models.time_encoding import hstu_bucket, log2_bucket


@pytest.mark.parametrize("per_second", [1, 1000])
def test_log2_buckets_are_those_of_the_history_gap(per_second: int) -> None:
    """A request's time and the gaps of a history must mean the same by the same bucket."""
    elapsed = sorted({max(0, boundary + step) for boundary in GAP_BOUNDARIES_MS for step in (-1000, -1, 0, 1, 1000)})
    expected = [min(29, sum(boundary <= ms for boundary in GAP_BOUNDARIES_MS)) for ms in elapsed]
    if per_second == 1:
        elapsed, expected = (
            [ms // 1000 for ms in elapsed],
            [min(29, sum(boundary <= ms // 1000 * 1000 for boundary in GAP_BOUNDARIES_MS)) for ms in elapsed],
        )
    assert log2_bucket(torch.tensor(elapsed), 30, per_second=per_second).tolist() == expected


def test_log2_buckets_of_floats_and_of_time_that_runs_backwards() -> None:
    seconds = torch.tensor([-1e12, -1.0, 0.0, 0.9, 1.0, 2.9, 3.0, 3600.0, 1e30])
    assert log2_bucket(seconds, 24).tolist() == [0, 0, 0, 0, 1, 1, 2, 11, 23]
    assert log2_bucket(torch.tensor([-(1 << 63), (1 << 63) - 1]), 64, per_second=1000).tolist() == [0, 52]
    assert log2_bucket(seconds, 1).tolist() == [0] * 9


def test_hstu_buckets_equal_their_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    ms = (10 ** (torch.rand(2000, generator=generator, dtype=torch.float64) * 15)).long()
    expected = [int(math.log(max(1.0, value / 1000)) / 0.301) for value in ms.tolist()]
    assert hstu_bucket(ms, 128).tolist() == expected
    assert hstu_bucket(ms, 20).tolist() == [min(19, value) for value in expected]
    assert hstu_bucket(torch.tensor([-(1 << 63), -5000, 0, 1350, 1352, (1 << 63) - 1]), 128).tolist() == [
        0, 0, 0, 0, 1, 122,
    ]  # fmt: skip
