"""The published size: its numbers, the same path at a small size, and a small run that is killed and learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.config import apply_overrides
from tackboard.core.errors import UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.models.interface import build_model
from tackboard.models.tables import table_parameter_names
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import RunConfig, config_from_json, config_to_json, features_for
from tackboard.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    "data.law.num_items": 2000,
    "data.law.num_topics": 10,
    "data.law.max_events": 16,
    "data.law.mean_events": 8,
    "data.law.num_users": 10_000,
    "data.law.num_test_users": 200,
    "data.tokens_per_step": 256,
    "data.uniform_negatives": 32,
    "data.evaluated_items": 100,
    "model.max_history": 16,
    "model.tables.num_rows": 100,
    "model.tables.dim": 4,
    "model.width": 16,
    "training.steps": 6,
    "training.checkpoint_every": 2,
}


def tackboard(*arguments: object, folder: Path) -> dict[str, Any]:
    """Runs the program to its end; returns the object on its last line."""
    done = subprocess.run(_command(*arguments), cwd=folder, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tackboard", *map(str, arguments)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src")}


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    groups = load_checkpoint(find_checkpoint(run)).tensors
    return {f"{group}.{name}": tensor for group, found in groups.items() for name, tensor in found.items()}


def opened(config: RunConfig) -> Any:
    return config.data.open(features_for(config))


def test_the_published_size_is_the_published_one() -> None:
    config = find_recipe("published")
    source = opened(config)
    with torch.device("meta"):
        model = build_model(config.model, source.vocabulary)
    tables = [p for name, p in model.named_parameters() if name in table_parameter_names(model)]
    assert sum(p.numel() for p in tables) == 20_480_000_000 and tables[0].dtype == torch.float16
    assert len(source.catalogue) >= 200_000_000
    assert config_from_json(config_to_json(config)) == config
    batch = config.data.steps(source, config.model.tables, config.seed)[1_000]
    assert batch.num_events == 65_536 and int(batch.item_rows.max()) > 79_000_000
    assert len(batch.item_ids) < 45_000


def test_more_than_a_tenth_of_the_published_rows_are_moved() -> None:
    """The expected share over the whole run, from the exact probabilities, with a shorter sum over rare items."""
    config = find_recipe("published")
    law, data = config.data.law, config.data
    num_tokens = config.training.steps * data.tokens_per_step
    ranks = np.unique(np.geomspace(1, law.num_items // law.num_topics + 1, 20_000).astype(np.int64)) - 1
    stream = opened(config).law
    middles = (ranks[:-1] + ranks[1:]) // 2
    shares = np.exp(stream.log_share(stream._ids(middles * law.num_topics)).astype(np.float64))
    shares /= (np.diff(ranks) * law.num_topics * shares).sum()
    num_seen = (np.diff(ranks) * law.num_topics * -np.expm1(-num_tokens * shares)).sum()
    assert -np.expm1(-num_seen / config.model.tables.num_rows) > 0.12


def test_the_small_recipe_is_the_same_run_at_another_size() -> None:
    large, small = config_to_json(find_recipe("published")), config_to_json(find_recipe("published-small"))
    assert large["model"]["config_class"] == small["model"]["config_class"]
    for name in ("loss", "maps", "num_time_buckets"):
        assert large["model"]["config"][name] == small["model"]["config"][name]
    assert small["model"]["config"]["tables"]["storage"] == "fp16"


class Crash(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_crashed_run_ends_in_the_same_bits(tmp_path: Path, torch_settings: None, num_workers: int) -> None:
    changes = {**TINY, "data.num_workers": num_workers, "training.num_threads": 1, "training.device": "cpu"}
    config = apply_overrides(find_recipe("published-small"), [f"{key}={value}" for key, value in changes.items()])

    def train(runs: str, on_checkpoint: Callable[[Trainer], None] | None = None) -> dict[str, torch.Tensor]:
        known = sorted((tmp_path / runs).glob("[0-9]*"))
        run = (
            RunDirectory.open(known[0]) if known else RunDirectory.create(tmp_path / runs, "x", config_to_json(config))
        )
        Trainer(config, run, opened(config), on_checkpoint=on_checkpoint).train(quiet=True)
        return tensors_of(run.path)

    def crash(trainer: Trainer) -> None:
        if trainer.step == 4:
            raise Crash

    whole = train("whole")
    with pytest.raises(Crash):
        train("crashed", crash)
    equal_tensors(whole, train("crashed"))


def test_a_run_whose_stream_changed_is_not_resumed(tmp_path: Path, torch_settings: None) -> None:
    changes = [f"{key}={value}" for key, value in TINY.items()]
    config = apply_overrides(find_recipe("published-small"), [*changes, "training.steps=1", "training.device=cpu"])
    run = RunDirectory.create(tmp_path, "x", config_to_json(config))
    Trainer(config, run, opened(config)).train(quiet=True)
    other = apply_overrides(config, ["data.law.seed=1"])
    with pytest.raises(UsageError, match="was started on snapshot stream-"):
        Trainer(other, run, opened(other)).train(quiet=True)


def equal_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def same_run(folder: Path, whole: dict[str, Any], ended: dict[str, Any]) -> None:
    assert len(list((folder / "stopped").glob("[0-9]*"))) == 1
    equal_tensors(*(tensors_of(folder / result["run"]) for result in (whole, ended)))
    assert (whole["final_loss"], whole["tokens"]) == (ended["final_loss"], ended["tokens"])


def kill_after(process: subprocess.Popen[bytes], runs: Path, step: int) -> None:
    """Kills the process as soon as its run has the checkpoint of `step`."""
    deadline = time.monotonic() + 120
    while not any(runs.glob(f"[0-9]*/checkpoints/step-{step:08d}")):
        assert time.monotonic() < deadline and process.poll() is None, "the run ended before it was killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_small_run_is_killed_resumes_in_the_same_bits_and_closes_a_quarter_of_the_gap(tmp_path: Path) -> None:
    settings = ["--set", "training.num_threads=2"]
    whole = tackboard("train", "published-small", *settings, "--runs", "whole", "--json", folder=tmp_path)
    stopped = [*_command("train", "published-small", *settings, "--runs", "stopped")]
    process = subprocess.Popen(stopped, cwd=tmp_path, env=_environment(), stderr=subprocess.DEVNULL)
    kill_after(process, tmp_path / "stopped", 100)
    ended = tackboard(
        *("train", "published-small", *settings, "--runs", "stopped", "--resume", "auto", "--json"), folder=tmp_path
    )
    same_run(tmp_path, whole, ended)
    assert ended["rows_moved_share"] > 0.1
    result = tackboard("evaluate", ended["run"], "--json", folder=tmp_path)
    losses = {row["name"]: row["log_loss"] for row in result["rows"]}
    assert losses["oracle"] < losses["model"] < losses["popularity"]
    assert result["gap_closed"] >= 0.25
