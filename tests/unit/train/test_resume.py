"""Which run is taken up again: the newest unfinished one whose result would be the same."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.manifest import write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.core.user_code import load_code
from tackboard.data.source import SequenceSource, snapshot_path
from tackboard.train.config import RunConfig, config_from_json, config_to_json
from tackboard.train.resume import FREE_SETTINGS, changed_settings, find_unfinished
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden"


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
    assert changed_settings(before, tiny_config()) == []
    changed = tiny_config("model.width=16", "model.tables.dim=3", "seed=3", "data.tokens_per_step=64")
    assert changed_settings(before, changed) == ["data.tokens_per_step", "model.tables.dim", "model.width", "seed"]


@pytest.mark.parametrize("setting", sorted(FREE_SETTINGS))
def test_settings_that_only_change_how_a_run_works_are_free(tiny_config: Config, setting: str) -> None:
    value = "host:3" if setting.endswith("address") else "3"
    assert changed_settings(config_to_json(tiny_config()), tiny_config(f"{setting}={value}")) == []


FIRST_SETTINGS = {
    "data": {"dataset", "features", "positive_actions", "max_length", "tokens_per_step", "num_workers"},
    "optimizer": {
        *("dense_learning_rate", "table_learning_rate", "weight_decay", "warmup_steps", "final_share", "clip_norm"),
        "clip_table_element",
    },
    "training": {"steps", "checkpoint_every", "log_every", "num_threads", "device"},
}
"""What the first version recorded of these tables: those of tests/golden/checkpoint-v1-features."""
FIRST_MODEL = {
    "tables.num_hashes": "hashing.num_hashes",
    "tables.num_rows": "hashing.num_rows",
    "tables.seed": "hashing.seed",
    "tables.dim": "table_dim",
    "tables.init_std": "table_init_std",
    **{f"backbone.{name}": name for name in ("num_layers", "num_heads", "mlp_ratio")},
    **{f"loss.{name}": name for name in ("initial_temperature", "correct_popularity", "mask_same_user")},
    **{name: name for name in ("width", "max_history", "num_time_buckets", "request_features", "dropout")},
}
"""And what of PinFM: today's name and the one it had."""


def as_first_recorded(config: dict[str, Any]) -> dict[str, Any]:
    """The config as the first version recorded it: with fewer settings, those of the model flat."""
    model: dict[str, Any] = {"hashing": {}}
    for new, old in FIRST_MODEL.items():
        value = functools.reduce(operator.getitem, new.split("."), config["model"]["config"])
        table, _, name = old.rpartition(".")
        (model[table] if table else model)[name] = value
    parts = {name: {key: config[name][key] for key in keys} for name, keys in FIRST_SETTINGS.items()}
    return copy.deepcopy(config | parts | {"model": config["model"] | {"config": model}})


@pytest.mark.parametrize(
    "override",
    [
        "data.held_out=2",
        "data.segments=newest",
        "data.uniform_negatives=5",
        "model.tables.method=modulo",
        "model.loss.in_batch_negatives=false",
        "model.backbone.positions=rotary",
        "model.tables.storage=bf16",
        "training.precision=bf16",
    ],
)
def test_what_older_runs_did_is_known_of_every_setting_added_since(tiny_config: Config, override: str) -> None:
    before = as_first_recorded(config_to_json(tiny_config()))
    assert changed_settings(before, tiny_config()) == []
    needed = {"model.tables.method=modulo": "model.tables.num_hashes=1"}
    needed["model.loss.in_batch_negatives=false"] = "data.uniform_negatives=5"
    changed = tiny_config(*([needed[override]] if override in needed else []), override)
    assert override.partition("=")[0] in changed_settings(before, changed)


@pytest.mark.usefixtures("torch_settings")
def test_a_run_recorded_before_these_settings_goes_on_to_the_same_bits(
    tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource, trained_run: RunDirectory
) -> None:
    config = tiny_config()
    run = RunDirectory.create(tmp_path, config.name, as_first_recorded(config_to_json(config)))
    trainer = Trainer(config, run, tiny_source)

    def stop(_trainer: Trainer) -> None:
        raise MemoryError

    trainer.on_checkpoint = stop
    with pytest.raises(MemoryError):
        trainer.train(quiet=True)
    for path in trainer.store.complete():
        state = json.loads((path / "state.json").read_text())
        older = as_first_recorded(state["config"])
        assert config_from_json(older) == config
        (path / "state.json").write_text(json.dumps(state | {"config": older, "model": older["model"]}))
        (path / "MANIFEST.json").unlink()
        write_manifest(path, "checkpoint", {"step": int(path.name.rpartition("-")[2])})
    found, sentence = find_unfinished(tmp_path, config)
    assert found is not None, sentence
    Trainer(config, found, tiny_source).train(quiet=True)
    ends = [load_checkpoint(find_checkpoint(each.path)) for each in (found, trained_run)]
    for group, tensors in ends[1].tensors.items():
        assert all(torch.equal(ends[0].tensors[group][name], tensor) for name, tensor in tensors.items())
    assert ends[0].state["step"] == 6


OWN_MODEL = """
import dataclasses
from torch import nn
from tackboard.models.interface import ModelConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(ModelConfig):
    depth: int = 1
    breadth: int = 2

    def build(self, vocabulary):
        return nn.Linear(self.depth, self.breadth)
"""


def test_a_model_of_a_users_own_is_read_with_the_class_that_is_wanted(tmp_path: Path, tiny_config: Config) -> None:
    """Nothing is loaded for it: the recorded file may be anybody's, and is never run."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    now = dataclasses.replace(tiny_config(), model=load_code(path).Mine(depth=7))
    before = config_to_json(now)
    described = before["model"]["config"]
    before["model"]["config"] = {"depth": 7, "hashing": described["tables"], "max_history": described["max_history"]}
    path.unlink()
    assert changed_settings(before, now) == []
    before["model"]["config"]["breadth"] = 3
    assert changed_settings(before, now) == ["model.breadth"]
    before["model"]["code_sha256"] = "other"
    assert changed_settings(before, now) == ["model.breadth", "model.code_sha256"]


@pytest.mark.parametrize(
    "model",
    [
        {"config_class": "tackboard.models.sequential:SequentialConfig", "config": {}},
        {"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {"depth": 3}},
        {"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {"width": -3}},
        {"config_class": "stranger.py:Mine", "code_file": "/nowhere/stranger.py", "config": {}},
        {},
        None,
    ],
)
def test_what_todays_classes_cannot_read_has_changed(tiny_config: Config, model: Any) -> None:
    before = config_to_json(tiny_config()) | {"model": model}
    assert any(name.startswith("model") for name in changed_settings(before, tiny_config()))


@pytest.mark.parametrize("name", ["checkpoint-v1", "checkpoint-v1-flat-pinfm", "checkpoint-v1-flat-sasrec"])
def test_runs_of_older_versions_can_be_taken_up_with_their_own_settings(name: str) -> None:
    recorded = json.loads((GOLDEN / name / "state.json").read_text())["config"]
    config = config_from_json(recorded)
    assert changed_settings(recorded, config) == []
    backbone = dataclasses.replace(config.model.backbone, num_layers=3)
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, backbone=backbone))
    assert changed_settings(recorded, changed) == ["model.backbone.num_layers"]


def test_the_newest_unfinished_run_of_this_config_is_found(tmp_path: Path, tiny_config: Config) -> None:
    wanted_config = tiny_config()
    config = config_to_json(wanted_config)
    assert find_unfinished(tmp_path / "absent", wanted_config)[0] is None
    make_run(tmp_path, "2024-01-01", config, "preempted")
    wanted = make_run(tmp_path, "2024-01-02", config, "failed: disk full")
    make_run(tmp_path, "2024-01-03", config_to_json(tiny_config("seed=9")), "preempted")
    make_run(tmp_path, "2024-01-04", config, "done")
    make_run(tmp_path, "2024-01-05", config | {"name": "other"}, "preempted")
    (tmp_path / "2024-01-06_tiny_abc").mkdir()  # killed before it had a config
    found, sentence = find_unfinished(tmp_path, tiny_config("data.num_workers=2"))
    assert found is not None
    assert sentence == f"resuming {wanted.path}"
    assert found.path == wanted.path
    wanted.set_status("done")
    found, _ = find_unfinished(tmp_path, wanted_config)
    assert found is not None
    assert found.path.name.startswith("2024-01-01")
    nothing, sentence = find_unfinished(tmp_path, tiny_config("seed=5"))
    assert nothing is None
    assert "2024-01-03_tiny" in sentence  # the newest that is unfinished is named, with what differs
    assert "differs in seed" in sentence


def test_a_run_on_a_named_snapshot_stays_on_it() -> None:
    for dataset in ("datasets/x", "datasets/x/2024"):
        assert snapshot_path({"dataset": dataset, "snapshot": "2024"}) == Path("datasets/x/2024")
