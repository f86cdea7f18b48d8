"""Which run is taken up again: the newest unfinished one whose result would be the same."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.manifest import write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource, snapshot_path
from tackboard.train.config import RunConfig, config_from_json, config_to_json
from tackboard.train.resume import ADDED_SETTINGS, FREE_SETTINGS, changed_settings, find_unfinished, snapshot_of
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]


def make_run(runs: Path, stamp: str, config: dict[str, Any], status: str | None) -> RunDirectory:
    path = runs / f"{stamp}_{config['name']}_abc"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    run = RunDirectory.open(path)
    if status:
        run.set_status(status)
    return run


def test_settings_that_decide_the_result_are_named(tiny_config: Config) -> None:
    before = config_to_json(tiny_config())
    assert changed_settings(before, config_to_json(tiny_config())) == []
    changed = config_to_json(tiny_config("model.width=16", "seed=3", "data.tokens_per_step=64"))
    assert changed_settings(before, changed) == ["data.tokens_per_step", "model.width", "seed"]


@pytest.mark.parametrize("setting", sorted(FREE_SETTINGS))
def test_settings_that_only_change_how_a_run_works_are_free(tiny_config: Config, setting: str) -> None:
    value = "host:3" if setting.endswith("address") else "3"
    assert changed_settings(config_to_json(tiny_config()), config_to_json(tiny_config(f"{setting}={value}"))) == []


def test_a_run_of_an_older_version_may_lack_a_setting(tiny_config: Config) -> None:
    before = config_to_json(tiny_config())
    del before["data"]["window_buckets"], before["data"]["ray_address"], before["optimizer"]["schedule_steps"]
    assert changed_settings(before, config_to_json(tiny_config())) == []
    assert changed_settings(before, config_to_json(tiny_config("data.window_buckets=3"))) == ["data.window_buckets"]
    changed = config_to_json(tiny_config("optimizer.schedule_steps=3"))
    assert changed_settings(before, changed) == ["optimizer.schedule_steps"]


def without(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config as a version recorded it that did not have these settings."""
    config = copy.deepcopy(config)
    for name in names:
        *path, last = name.split(".")
        del functools.reduce(operator.getitem, path, config)[last]
    return config


@pytest.mark.parametrize(
    "override",
    [
        "data.held_out=2",
        "data.segments=newest",
        "data.uniform_negatives=5",
        "model.hashing.method=modulo",
        "model.in_batch_negatives=false",
        "model.positions=rotary",
        "model.table_storage=bf16",
        "training.precision=bf16",
    ],
)
def test_what_older_runs_did_is_known_of_every_setting_added_since(tiny_config: Config, override: str) -> None:
    before = without(config_to_json(tiny_config()), ADDED_SETTINGS)
    assert changed_settings(before, config_to_json(tiny_config())) == []
    needed = {"model.hashing.method=modulo": "model.hashing.num_hashes=1"}
    needed["model.in_batch_negatives=false"] = "data.uniform_negatives=5"
    changed = config_to_json(tiny_config(*([needed[override]] if override in needed else []), override))
    assert override.partition("=")[0] in changed_settings(before, changed)


def test_a_setting_is_either_recorded_since_the_first_version_or_its_old_behaviour_is_known(
    tiny_config: Config,
) -> None:
    """Whoever adds a setting says here what runs without it did, or none of them could be resumed."""
    config = config_to_json(tiny_config())
    recorded = {name: len(value) for name, value in without(config, ADDED_SETTINGS).items() if isinstance(value, dict)}
    model = without(config, ADDED_SETTINGS)["model"]["config"]
    assert recorded == {"data": 7, "model": 2, "optimizer": 7, "training": 5, "guard": 4, "evaluation": 3}
    assert (len(model), len(model["hashing"])) == (14, 3)


@pytest.mark.usefixtures("torch_settings")
def test_a_run_recorded_before_these_settings_goes_on_to_the_same_bits(
    tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource, trained_run: RunDirectory
) -> None:
    config = tiny_config()
    run = RunDirectory.create(tmp_path, config.name, without(config_to_json(config), ADDED_SETTINGS))
    trainer = Trainer(config, run, tiny_source)

    def stop(_trainer: Trainer) -> None:
        raise MemoryError

    trainer.on_checkpoint = stop
    with pytest.raises(MemoryError):
        trainer.train(quiet=True)
    for path in trainer.store.complete():
        state = json.loads((path / "state.json").read_text())
        assert config_from_json(without(state["config"], ADDED_SETTINGS)) == config
        (path / "state.json").write_text(json.dumps(state | {"config": without(state["config"], ADDED_SETTINGS)}))
        (path / "MANIFEST.json").unlink()
        write_manifest(path, "checkpoint", {"step": int(path.name.rpartition("-")[2])})
    found, sentence = find_unfinished(tmp_path, config_to_json(config))
    assert found is not None, sentence
    Trainer(config, found, tiny_source).train(quiet=True)
    ends = [load_checkpoint(find_checkpoint(each.path)) for each in (found, trained_run)]
    for group, tensors in ends[1].tensors.items():
        assert all(torch.equal(ends[0].tensors[group][name], tensor) for name, tensor in tensors.items())
    assert ends[0].state["step"] == 6


def test_a_setting_that_one_side_lacks_counts_as_changed() -> None:
    assert changed_settings({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == ["a.c"]
    assert changed_settings({"a": {"c": 2}}, {"a": {}}) != []


def test_the_newest_unfinished_run_of_this_config_is_found(tmp_path: Path, tiny_config: Config) -> None:
    config = config_to_json(tiny_config())
    assert find_unfinished(tmp_path / "absent", config)[0] is None
    make_run(tmp_path, "2024-01-01", config, "preempted")
    wanted = make_run(tmp_path, "2024-01-02", config, "failed: disk full")
    make_run(tmp_path, "2024-01-03", config_to_json(tiny_config("seed=9")), "preempted")
    make_run(tmp_path, "2024-01-04", config, "done")
    make_run(tmp_path, "2024-01-05", config | {"name": "other"}, "preempted")
    (tmp_path / "2024-01-06_tiny_abc").mkdir()  # killed before it had a config
    found, sentence = find_unfinished(tmp_path, config_to_json(tiny_config("data.num_workers=2")))
    assert found is not None
    assert sentence == f"resuming {wanted.path}"
    assert found.path == wanted.path
    wanted.set_status("done")
    found, _ = find_unfinished(tmp_path, config)
    assert found is not None
    assert found.path.name.startswith("2024-01-01")
    nothing, sentence = find_unfinished(tmp_path, config_to_json(tiny_config("seed=5")))
    assert nothing is None
    assert "2024-01-03_tiny" in sentence  # the newest that is unfinished is named, with what differs
    assert "with another seed" in sentence


def test_the_snapshot_of_a_run_is_the_one_it_was_started_on(trained_run: RunDirectory, tiny_dataset: Path) -> None:
    checkpoint = load_checkpoint(find_checkpoint(trained_run.path))
    assert snapshot_of(checkpoint) == tiny_dataset / (tiny_dataset / "latest").resolve().name


def test_a_run_on_a_named_snapshot_stays_on_it() -> None:
    for dataset in ("datasets/x", "datasets/x/2024"):
        assert snapshot_path({"dataset": dataset, "snapshot": "2024"}) == Path("datasets/x/2024")
