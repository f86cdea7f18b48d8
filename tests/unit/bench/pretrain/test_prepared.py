"""What the rival reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from safetensors import safe_open

from tackboard.bench.pretrain import prepared
from tackboard.bench.pretrain.prepared import has_rival, prepare
from tackboard.data.source import SequenceSource
from tackboard.recipes.public import ml_1m
from tackboard.train.config import RunConfig


def test_batches_and_parameters_are_written(
    tiny_config: RunConfig, tiny_bench_source: SequenceSource, tmp_path: Path
) -> None:
    path = tmp_path / "batches.safetensors"
    found = prepare(tiny_config, tiny_bench_source, path, num_batches=3, is_half=False)
    assert found.first_loss is not None
    assert found.counts.num_negatives <= 64
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    assert {"0.items", "2.log_weights", "2.action", "model.item_tables.weight"} <= names
    assert "3.items" not in names


def test_large_tables_are_not_written(
    tiny_config: RunConfig, tiny_bench_source: SequenceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "LARGEST_BYTES", 10)
    path = tmp_path / "batches.safetensors"
    assert prepare(tiny_config, tiny_bench_source, path, num_batches=1, is_half=True).first_loss is None
    with safe_open(path, "pt") as file:
        assert not any(name.startswith("model.") for name in file.keys())  # noqa: SIM118


def test_the_rival_has_only_the_plain_model(tiny_config: RunConfig) -> None:
    assert has_rival(tiny_config)
    assert not has_rival(ml_1m())
    rotary = dataclasses.replace(tiny_config.model.backbone, positions="rotary")
    assert not has_rival(
        dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, backbone=rotary))
    )
