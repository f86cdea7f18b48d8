"""Feeding a device: what can be measured without one."""

from __future__ import annotations

import pytest
import torch

from tackboard.batch import HashConfig
from tackboard.bench import feeding
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.source import SequenceSource


@pytest.fixture
def steps(tiny_source: SequenceSource) -> TrainingSteps:
    config = DataConfig(dataset="tiny", max_length=8, tokens_per_step=40)
    return TrainingSteps(tiny_source, config, HashConfig(num_hashes=2, num_rows=16), seed=1)


def test_the_host_is_measured_for_every_number_of_workers(steps: TrainingSteps) -> None:
    found = feeding.measure_host(steps, 6)
    assert list(found) == ["0", "1", "2", "4", "8"]
    assert all(figures["per_s"] > 0 and figures["per_cpu_s"] > 0 for figures in found.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_figures_of_one(steps: TrainingSteps) -> None:
    assert feeding.measure_device(steps, 6) is None


@pytest.mark.gpu
def test_every_way_of_feeding_a_gpu_is_measured(steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "STEP_MS", 1.0)
    found = feeding.measure_device(steps, 6)
    assert found is not None
    assert len(found) == 1 + 4 * 3 * 2
    assert min(found.values()) > 0
