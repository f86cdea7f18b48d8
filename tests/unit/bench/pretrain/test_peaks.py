"""The peaks of the device that is there."""

from __future__ import annotations

import pytest
import torch

from tackboard.bench.pretrain import peaks
from tackboard.bench.pretrain.peaks import Peaks


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Peaks:
    monkeypatch.setitem(peaks.SQUARE, "cpu", 64)
    monkeypatch.setitem(peaks.COPIED_NUMBERS, "cpu", 1 << 12)
    return Peaks(torch.device("cpu"), torch.float32, repeats=2)


def test_speeds_are_positive_and_measured_once(small: Peaks) -> None:
    assert small.flops_per_s > 0
    assert small.bytes_per_s > 0
    assert small.product_seconds(8, 4, 2) == small.product_seconds(8, 4, 2) > 0
    assert small.product_seconds(8, 0, 2) == 0.0


def test_a_product_that_does_not_fit_is_measured_in_part(small: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peaks.MOST_CELLS, "cpu", 64)
    monkeypatch.setattr(small, "_best", lambda work: float(work().shape.numel() // 2))
    # 31 × 4 cells are too many: 15 × 4 are measured, and the time is scaled from 15 back to 31 rows.
    assert small.product_seconds(31, 4, 2) == pytest.approx(31.0)
