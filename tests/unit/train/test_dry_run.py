"""The estimate before a run: its sizes are those of the real model and the real checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_parameters
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.data.loader import TrainingSteps
from tackboard.data.source import SequenceSource
from tackboard.models.interface import build_model
from tackboard.train import dry_run
from tackboard.train.config import RunConfig, StartConfig, config_to_json
from tackboard.train.dry_run import estimate_run
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

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


def test_checkpoints_that_may_not_fit_on_the_disk_are_told_and_those_that_cannot_are_refused(
    tiny_config: Config,
    tiny_source: SequenceSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate = estimate_run(tiny_config(), tiny_source, tmp_path)
    at_most, at_least = 3 * estimate["checkpoint_bytes"], 3 * 4 * estimate["dense_parameters"]
    capsys.readouterr()
    for free, says in ((at_most, ""), (at_most - 1, "3 checkpoints may need up to"), (at_least, "may need up to")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        estimate_run(tiny_config(), tiny_source, tmp_path)
        said = capsys.readouterr().err
        assert says in said and bool(said) == bool(says)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=at_least - 1))
    with pytest.raises(UsageError, match="checkpoints need"):
        estimate_run(tiny_config(), tiny_source, tmp_path)
    # A resumed run has its older checkpoints on the disk already.
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=at_least // 3))
    estimate_run(tiny_config(), tiny_source, tmp_path, is_resumed=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=at_least // 3 - 1))
    with pytest.raises(UsageError, match="checkpoints need"):
        estimate_run(tiny_config(), tiny_source, tmp_path, is_resumed=True)


@pytest.mark.usefixtures("torch_settings")
def test_the_rows_of_the_catalogue_bound_a_checkpoint(
    tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (
        estimate_run(tiny_config(f"model.tables.num_rows={number}"), tiny_source, tmp_path)
        for number in (10_000, 20_000)
    )
    assert small["checkpoint_bytes"] == large["checkpoint_bytes"] < 4 * small["table_parameters"]
    assert large["state_bytes"] - small["state_bytes"] == 2 * 10_000 * 4 * (4 + 1)
    assert small["peak_host_bytes"] == small["state_bytes"] + small["checkpoint_bytes"]
    config = tiny_config("model.tables.num_rows=10000", "training.steps=1")
    another = RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
    Trainer(config, another, tiny_source).train(quiet=True)
    whole = estimate_run(dataclasses.replace(config, start=StartConfig(run=str(another.path))), tiny_source, tmp_path)
    assert whole["checkpoint_bytes"] - small["checkpoint_bytes"] > 0.9 * 4 * small["table_parameters"]
    monkeypatch.setattr(dry_run, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1 << 40))
    on_gpu = estimate_run(tiny_config("model.tables.num_rows=10000"), tiny_source, tmp_path)
    assert on_gpu["peak_host_bytes"] == 4 * small["dense_parameters"] + small["checkpoint_bytes"]


def test_a_device_that_is_not_there_is_found_before_training(
    tiny_config: Config, tiny_source: SequenceSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        estimate_run(tiny_config("training.device=cuda"), tiny_source, tmp_path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("start.prefix=encoder.", r"start.prefix = encoder\. fits no parameter"),
        ("model.tables.num_rows=32", "model.tables.num_rows is 32, but .* was trained with 16"),
        ('optimizer.multipliers={"pinm.": 0.1}', "optimizer.multipliers names 'pinm.'"),
        ('model.head.labels=["clik"]', "model.head.labels names 'clik'"),
        ("model.head.labels=[]", "model.head.labels names no label of the data"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before(
    ranker_config: Config, trained_run: RunDirectory, tmp_path: Path, setting: str, said: str
) -> None:
    config = ranker_config(f"start.run={trained_run.path}", "start.prefix=pinfm.")
    estimate_run(config, open_source(config), tmp_path)
    config = ranker_config(f"start.run={trained_run.path}", "start.prefix=pinfm.", setting)
    with pytest.raises((UsageError, ConfigError), match=said):
        estimate_run(config, open_source(config), tmp_path)


def test_a_resumed_run_needs_no_run_to_start_from(
    ranker_config: Config, trained_run: RunDirectory, tmp_path: Path
) -> None:
    source = open_source(ranker_config(f"start.run={trained_run.path}"))
    gone = ranker_config("start.run=gone")
    assert estimate_run(gone, source, tmp_path, is_resumed=True)["dense_parameters"] > 0
