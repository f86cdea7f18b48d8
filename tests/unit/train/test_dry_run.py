"""The estimate before a run: its sizes are those of the real model and the real checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_parameters
from tackboard.core.errors import UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.data.loader import TrainingSteps
from tackboard.data.source import SequenceSource
from tackboard.models.interface import build_model
from tackboard.train import dry_run
from tackboard.train.config import RunConfig
from tackboard.train.dry_run import estimate_run

Config = Callable[..., RunConfig]


def test_sizes_are_those_of_the_real_model(tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path) -> None:
    config = tiny_config()
    estimate = estimate_run(config, tiny_source, tmp_path / "not" / "yet" / "there")
    model = build_model(config.model, tiny_source.vocabulary)
    tables = model.get_parameter("item_tables.weight").numel()
    assert estimate["table_parameters"] == tables == 2 * 16 * 4
    assert estimate["dense_parameters"] == sum(p.numel() for p in model.parameters()) - tables
    steps = TrainingSteps(tiny_source, config.data, config.model.tables, config.seed)
    assert estimate["steps_per_epoch"] == steps.plan.steps_per_epoch
    assert estimate["training_tokens"] == sum(steps[number].num_events for number in range(steps.plan.steps_per_epoch))
    assert estimate["users"] == tiny_source.dataset.num_users
    assert not (tmp_path / "not").exists()


def test_a_checkpoint_of_whole_tables_is_as_large_as_estimated(
    tiny_config: Config, tiny_source: SequenceSource, trained_run: RunDirectory
) -> None:
    estimate = estimate_run(tiny_config(), tiny_source, trained_run.path)
    checkpoint = load_trained(find_checkpoint(trained_run.path), ("dense", "tables", "optimizer"))
    whole = stored_parameters(checkpoint) | stored_optimizer(checkpoint)
    sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in whole.items()}
    # Left out of the estimate: AdamW's step count of each parameter, a few bytes.
    assert estimate["checkpoint_bytes"] == sum(size for name, size in sizes.items() if not name.endswith(".step"))


def test_a_model_larger_than_memory_is_refused_without_being_built(
    tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path
) -> None:
    huge = tiny_config("model.tables.num_rows=2000000000", "model.tables.dim=1000")
    with pytest.raises(UsageError, match="the model needs 16016"):
        estimate_run(huge, tiny_source, tmp_path)


@pytest.mark.parametrize(("of_gpu", "of_machine", "words"), [(1, 1 << 40, "its GPU has"), (1 << 40, 1, "this machine")])
def test_a_model_for_a_gpu_must_fit_there_and_here(
    tiny_config: Config,
    tiny_source: SequenceSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_gpu: int,
    of_machine: int,
    words: str,
) -> None:
    monkeypatch.setattr(dry_run, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=of_gpu))
    monkeypatch.setattr(dry_run, "total_memory_bytes", lambda: of_machine)
    with pytest.raises(UsageError, match=words):
        estimate_run(tiny_config(), tiny_source, tmp_path)


def test_checkpoints_larger_than_the_disk_are_refused(
    tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 3 * estimate_run(tiny_config(), tiny_source, tmp_path)["checkpoint_bytes"]
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        if free == needed:
            estimate_run(tiny_config(), tiny_source, tmp_path)
            continue
        with pytest.raises(UsageError, match="checkpoints need"):
            estimate_run(tiny_config(), tiny_source, tmp_path)


def test_a_device_that_is_not_there_is_found_before_training(
    tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        estimate_run(tiny_config("training.device=cuda"), tiny_source, tmp_path)
