"""Every step of our own ladder gives the same segments and the same tensors, and in every epoch another order."""

from pathlib import Path

import pytest
import torch

from tackboard.bench.loader.check import Reference, batch_arrays
from tackboard.bench.loader.contender import write_check
from tackboard.bench.loader.data import Setting
from tackboard.bench.loader.ours import VARIANTS, Contender


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_are_those_of_make_batch(loader_folder: Path, tmp_path: Path, variant: str) -> None:
    found = write_check(Contender(loader_folder, variant).epoch(1), tmp_path / "check.npz")
    assert 0 < found["most_tokens"] <= 512
    assert Reference(Setting.read(loader_folder)).differences(tmp_path / "check.npz") == []


def test_streamed_ways_agree_batch_for_batch(loader_folder: Path) -> None:
    epochs = [list(Contender(loader_folder, variant).epoch(0)) for variant in ("streamed", "columns", "product")]
    assert len(epochs[0]) > 5
    for batches in zip(*epochs, strict=True):
        expected, *others = map(batch_arrays, batches)
        for other in others:
            assert all(torch.equal(torch.from_numpy(expected[n]), torch.from_numpy(other[n])) for n in expected)


def test_another_epoch_has_another_order(loader_folder: Path) -> None:
    contender = Contender(loader_folder, "memory")
    first, second = (next(iter(contender.epoch(number))) for number in (0, 1))
    assert first.users.tolist() != second.users.tolist()
