"""The rival of the pretraining bench computes our loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from rivals import plain_pretrain
from tackboard.bench.pretrain.data import PRESETS, config_of, dataset_of
from tackboard.bench.pretrain.prepared import prepare
from tackboard.core.config import apply_overrides
from tackboard.train.start import open_source


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_the_first_loss_of_plain_pytorch_equals_ours(tmp_path: Path) -> None:
    config = config_of(PRESETS["tiny"], dataset_of(PRESETS["tiny"], tmp_path))
    config = apply_overrides(config, ["training.num_threads=1"])
    ours = prepare(config, open_source(config), tmp_path / "batches.safetensors", num_batches=2, is_half=False)
    spec = {"device": "cpu", "batches": str(ours.path), "warmup": 1, "timed": 6}
    found = plain_pretrain.train(spec)
    assert found["first_loss"] == pytest.approx(ours.first_loss, rel=1e-5)
    assert found["last_loss"] < found["first_loss"]
    assert found["tokens_per_s"] > 0
