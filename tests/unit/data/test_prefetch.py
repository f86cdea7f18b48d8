"""Batches on the device; on a CPU they pass through, on a GPU the `gpu` tests look at the copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.prefetch import on_device
from tackboard.data.source import SequenceSource


def steps_of(source: SequenceSource) -> TrainingSteps:
    config = DataConfig(dataset="tiny", max_length=8, tokens_per_step=40)
    return TrainingSteps(source, config, HashConfig(num_hashes=2, num_rows=16), seed=1)


def test_on_a_cpu_batches_pass_in_order_and_no_further_than_asked(tiny_source: SequenceSource) -> None:
    steps, asked = steps_of(tiny_source), []

    def batches() -> Iterator[tuple[int, SequenceBatch]]:
        for step in range(6):
            asked.append(step)
            yield step, steps[step]

    pairs = on_device(batches(), torch.device("cpu"))
    number, batch = next(pairs)
    assert (number, asked) == (0, [0])
    assert torch.equal(batch.items, steps[0].items)
    assert [number for number, _ in pairs] == [1, 2, 3, 4, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_batches_arrive_whole_and_one_ahead(tiny_source: SequenceSource, num_workers: int) -> None:
    device = torch.device("cuda")
    steps = steps_of(tiny_source)
    numbers = list(range(12))
    busy = torch.randn(2048, 2048, device=device)
    seen = []
    for number, batch in on_device(steps.iterate(numbers, num_workers), device):
        for _ in range(20):  # The current stream is kept busy, so that a copy that nobody waited for would show.
            busy = busy @ busy / 100
        assert all(tensor.is_cuda for tensor in batch.tensors())
        total = sum(tensor.double().sum() for tensor in batch.tensors())
        seen.append((number, total))
        del batch
    expected = [(n, sum(tensor.double().sum().item() for tensor in steps[n].tensors())) for n in numbers]
    assert [(number, total.item()) for number, total in seen] == pytest.approx(expected)
