"""Which run is taken up again: the newest unfinished one whose result would be the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.rundir import RunDirectory
from tackboard.data.source import snapshot_path
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.resume import FREE_SETTINGS, changed_settings, find_unfinished, snapshot_of

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
    assert changed_settings(before, changed) == ["data.tokens_per_step", "model.config.width", "seed"]


@pytest.mark.parametrize("setting", sorted(FREE_SETTINGS))
def test_settings_that_only_change_how_a_run_works_are_free(tiny_config: Config, setting: str) -> None:
    value = "host:3" if setting.endswith("address") else "3"
    assert changed_settings(config_to_json(tiny_config()), config_to_json(tiny_config(f"{setting}={value}"))) == []


def test_a_run_of_an_older_version_may_lack_a_setting(tiny_config: Config) -> None:
    before = config_to_json(tiny_config())
    del before["data"]["window_buckets"], before["data"]["ray_address"]
    assert changed_settings(before, config_to_json(tiny_config())) == []
    assert changed_settings(before, config_to_json(tiny_config("data.window_buckets=3"))) == ["data.window_buckets"]


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


def test_the_snapshot_of_a_run_is_the_one_it_was_started_on(
    trained_run: RunDirectory, tiny_dataset: Path, tmp_path: Path, tiny_config: Config
) -> None:
    assert snapshot_of(trained_run) == tiny_dataset / (tiny_dataset / "latest").resolve().name
    assert snapshot_of(make_run(tmp_path, "2024-01-01", config_to_json(tiny_config()), None)) is None


def test_a_run_on_a_named_snapshot_stays_on_it() -> None:
    for dataset in ("datasets/x", "datasets/x/2024"):
        assert snapshot_path({"dataset": dataset, "snapshot": "2024"}) == Path("datasets/x/2024")
