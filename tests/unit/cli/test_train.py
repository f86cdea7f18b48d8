"""`tackboard train`: looking before running, the two-step run, and taking a run up again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.bundle.signature import read_bundle
from tackboard.core.rundir import RunDirectory
from tackboard.data import index
from tackboard.data.source import SequenceSource
from tackboard.events.dataset import INDEX
from tackboard.events.privacy.forgetting import add_forgotten
from tackboard.train.config import RunConfig, config_from_json
from tackboard.train.trainer import Trainer

Program = Callable[..., Any]


@pytest.fixture
def settings(tiny_dataset: Path) -> list[str]:
    """Arguments that make the demo's recipe a run of seconds on the tiny dataset."""
    changes = {
        "data.dataset": tiny_dataset,
        "data.positive_actions": '["click","save"]',
        "data.max_length": 8,
        "data.tokens_per_step": 64,
        "model.tables.num_rows": 16,
        "model.tables.dim": 4,
        "model.width": 8,
        "training.steps": 4,
        "training.checkpoint_every": 2,
        "training.num_threads": 1,
        "training.device": "cpu",
    }
    return [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]


def test_print_config_is_the_resolved_config_and_runs_again(
    tackboard: Program, settings: list[str], tmp_path: Path
) -> None:
    answer = tackboard("train", "demo", *settings, "--print-config", "--runs", tmp_path / "runs")
    assert answer.code == 0
    config = config_from_json(json.loads(answer.out))
    assert (config.model.width, config.training.steps, config.data.max_length) == (8, 4, 8)
    assert not (tmp_path / "runs").exists()


def test_narrow_tables_are_in_the_resolved_config(tackboard: Program, settings: list[str]) -> None:
    plain, narrow = (
        config_from_json(json.loads(tackboard("train", "demo", *settings, *flags, "--print-config").out))
        for flags in ((), ("--narrow-tables",))
    )
    tables = plain.model.tables
    assert narrow.model.tables == dataclasses.replace(tables, dim=tables.dim // 2, num_rows=2 * tables.num_rows)
    assert dataclasses.replace(narrow.model, tables=tables) == plain.model
    odd = tackboard("train", "demo", *settings, "--set", "model.tables.dim=3", "--narrow-tables", "--print-config")
    assert odd.code == 2
    assert "model.tables.dim" in odd.err


def test_dry_run_reports_sizes_and_writes_nothing(tackboard: Program, settings: list[str], tmp_path: Path) -> None:
    answer = tackboard("train", "demo", *settings, "--dry-run", "--json", "--runs", tmp_path / "runs")
    assert answer.code == 0
    assert answer.json()["table_parameters"] == 4 * 16 * 4
    assert answer.json()["users"] == 14
    assert list(tmp_path.iterdir()) == []
    text = tackboard("train", "demo", *settings, "--dry-run", "--runs", tmp_path / "runs").out
    assert "table_parameters  256" in text


def test_forgotten_users_that_are_still_there_are_told(
    tackboard: Program, settings: list[str], tiny_dataset: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "copy"
    shutil.copytree(tiny_dataset, dataset, symlinks=True)
    again = [*settings, "--set", f"data.dataset={dataset}", "--dry-run", "--runs", str(tmp_path / "runs")]
    assert "forgotten" not in tackboard("train", "demo", *again).err
    add_forgotten(dataset, [103, 105])
    answer = tackboard("train", "demo", *again)
    assert answer.code == 0
    assert "holds 2 forgotten users; remove them: tackboard data retain" in answer.err
    assert not re.search(r"\b10[35]\b", answer.err)


@pytest.fixture
def news(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """A log whose items live for 32 hours, and which nobody reads twice."""
    return make_dataset(
        tmp_path,
        [
            (10 * back + hour % 10, hour - back + 31, "click", "home", 3_600_000 * hour + back)
            for hour in range(400)
            for back in range(32)
        ],
        name="news",
    )


def test_a_run_whose_settings_do_not_fit_the_log_is_warned(
    tackboard: Program, settings: list[str], news: Path, tmp_path: Path
) -> None:
    again = [*settings, "--set", f"data.dataset={news}", "--set", "data.positive_actions=[]", "--dry-run"]
    again += ["--runs", str(tmp_path / "runs")]
    lines = [line for line in tackboard("train", "demo", *again).err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2, lines
    assert "data.split is last" in lines[0] and lines[0].endswith("--set data.split=time --set data.cut=0.9")
    assert "evaluation.filter_seen is false" in lines[1]
    advised = ["--set", "data.split=time", "--set", "data.cut=0.9", "--set", "evaluation.filter_seen=true"]
    answer = tackboard("train", "demo", *again, *advised)
    assert answer.code == 0 and "warning" not in answer.err


def test_fast_dev_run_goes_the_whole_way(tackboard: Program, settings: list[str], tmp_path: Path) -> None:
    answer = tackboard("train", "demo", *settings, "--fast-dev-run", "--json", "--runs", tmp_path / "runs")
    assert answer.code == 0, answer.err
    result = answer.json()
    assert (result["status"], result["step"], result["evaluated_users"]) == ("done", 2, 14)
    run = Path(result["run"])
    assert read_bundle(Path(result["bundle"])).lineage["run"] == run.name
    assert Path(result["checkpoint"]).name == "step-00000002"
    assert json.loads((run / "eval" / "metrics.json").read_text())["num_users"] == 14
    assert {"config.json", "env.json", "metrics.jsonl", "events.jsonl", "log.txt", "STATUS"} <= set(os.listdir(run))
    assert (tmp_path / "runs" / "latest").resolve() == run.resolve()
    assert "\r" not in answer.err


def test_what_is_read_and_what_is_left_on_disk_is_said(tackboard: Program, settings: list[str], tmp_path: Path) -> None:
    """A model without time buckets and features of the request: neither times nor anything else is loaded for them."""
    plain = [*settings, "--set", "model.num_time_buckets=0", "--set", "model.request_features=[]"]
    answer = tackboard("train", "demo", *plain, "--fast-dev-run", "--json", "--runs", tmp_path / "runs")
    assert answer.code == 0, answer.err
    result = answer.json()
    assert result["features"] == ["history.item", "history.action", "history.surface"]
    assert result["trimming"]["read"] == ["item", "action", "surface"]
    assert result["trimming"]["skipped"] == ["time", "received"]
    assert list(read_bundle(Path(result["bundle"])).reads) == result["features"]
    text = tackboard("train", "demo", *plain, "--runs", tmp_path / "runs").out
    assert "history.item, history.action, history.surface" in text
    assert "not read: time, received;" in text
    loss = next(line.split()[1] for line in text.splitlines() if "final_loss" in line)
    assert 0 < len(loss.partition(".")[2]) <= 4


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events of each pass over a dataset to index it, in order."""
    made: list[int] = []
    honest = index._pass_over

    def count(source: SequenceSource, *arguments: Any, **more: Any) -> Any:
        made.append(source.dataset.num_events)
        return honest(source, *arguments, **more)

    monkeypatch.setattr(index, "_pass_over", count)
    return made


def test_data_is_indexed_once(
    tackboard: Program, settings: list[str], tiny_dataset: Path, tmp_path: Path, passes: list[int]
) -> None:
    """By the first of two runs over one snapshot; and once in a run that can keep no index."""
    copy, alone = tmp_path / "copy", tmp_path / "alone" / "snapshot"
    shutil.copytree(tiny_dataset, copy, symlinks=True, ignore=shutil.ignore_patterns(INDEX))
    shutil.copytree((tiny_dataset / "latest").resolve(), alone)
    command = ["train", "demo", *settings, "--json", "--runs", tmp_path / "runs"]
    results = [tackboard(*command, "--set", f"data.dataset={data}").json() for data in (copy, copy, alone)]
    assert len(passes) == 2
    assert len({(result["final_loss"], result["tokens"]) for result in results}) == 1
    passes.clear()
    assert tackboard(*command, "--set", f"data.dataset={copy}", "--resume", results[1]["run"]).code == 0
    assert passes == []


def interrupt(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """Makes every trainer die in its `at_step`-th step."""
    honest = Trainer._one_step

    def one_step(self: Trainer, data_step: int, batch: Any) -> bool:
        if self.step == at_step:
            raise MemoryError
        return honest(self, data_step, batch)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


def test_resume_auto_takes_up_the_unfinished_run_of_this_config(
    tackboard: Program, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "demo", *settings, "--json", "--runs", tmp_path / "runs", "--resume", "auto"]
    with monkeypatch.context() as patched:
        interrupt(patched, at_step=3)
        failed = tackboard(*command)
        assert failed.code == 1
        assert "nothing to resume" in failed.err
    answer = tackboard(*command)
    assert answer.code == 0, answer.err
    assert answer.err.startswith("resuming ")
    assert answer.json()["step"] == 4
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]) == 1
    again = tackboard(*command)  # that one is done: nothing is left to resume
    assert again.json()["run"] != answer.json()["run"]


def test_resume_of_a_named_run_refuses_other_settings_and_allows_free_ones(
    tackboard: Program, settings: list[str], tmp_path: Path
) -> None:
    runs = ["--runs", tmp_path / "runs"]
    run = tackboard("train", "demo", *settings, "--set", "training.steps=1", "--json", *runs).json()["run"]
    answer = tackboard("train", "demo", *settings, "--set", "seed=1", *runs, "--resume", run)
    assert answer.code == 2
    assert "seed" in answer.err and "training.steps" in answer.err
    other = tackboard("train", "demo", *settings, "--set", "model.dropout=0.5", *runs, "--resume", run)
    assert "other settings: model.dropout, training.steps" in other.err
    assert len(answer.err.splitlines()) == 3
    free = ["--set", "training.steps=1", "--set", "training.log_every=3"]
    tackboard("train", "demo", *settings, "--set", "seed=7", *runs)
    assert tackboard("train", "demo", *settings, *free, *runs, "--resume", run).code == 0
    assert (tmp_path / "runs" / "latest").resolve() == Path(run).resolve()  # what README's next lines will read
    assert tackboard("train", "demo", *settings, *runs, "--resume", tmp_path).code == 3


def test_a_resumed_run_reads_the_snapshot_it_was_started_on(
    tackboard: Program,
    settings: list[str],
    tmp_path: Path,
    make_dataset: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = [(user, item, "click", "home", item) for user in range(6) for item in range(6)]
    dataset = make_dataset(tmp_path / "datasets", log)
    changed = ["--set", f"data.dataset={dataset}", "--set", 'data.positive_actions=["click"]']
    command = ["train", "demo", *settings, *changed, "--json", "--runs", tmp_path / "runs", "--resume", "auto"]
    with monkeypatch.context() as patched:
        interrupt(patched, at_step=3)
        assert tackboard(*command).code == 1
    make_dataset(tmp_path / "datasets", [(user, item, "buy", "tv", 1) for user, item, *_ in log])
    answer = tackboard(*command)
    assert answer.code == 0, answer.err
    assert answer.err.startswith("resuming ")


def test_a_users_recipe_and_config(
    tackboard: Program, tiny_config: Callable[..., RunConfig], tmp_path: Path, trained_run: RunDirectory
) -> None:
    """A file beside the user's data, with a RunConfig of its own."""
    values = {"dataset": tiny_config().data.dataset}
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tackboard.train.config import RunConfig, TrainingConfig\n"
        "from tackboard.data.loader import DataConfig\n"
        "from tackboard.models.pinfm import PinFMConfig\n"
        "def small():\n"
        f"    return RunConfig(name='mine', data=DataConfig(dataset={values['dataset']!r}),\n"
        "        model=PinFMConfig(width=8),\n"
        "        training=TrainingConfig(steps=1, num_threads=1, device='cpu'))\n"
    )
    answer = tackboard("train", f"{recipe}:small", "--json", "--runs", tmp_path / "runs")
    assert answer.code == 0, answer.err
    assert "_mine_" in answer.json()["run"]


def test_continue_goes_on_with_the_newest_run(
    tackboard: Program, settings: list[str], tmp_path: Path, tiny_dataset: Path
) -> None:
    """Two nights with the same command. The second is resumed by it too, though `latest` then names itself."""
    runs, cut = tmp_path / "runs", ["--set", "data.split=time", "--set", "data.cut=0.6"]
    every = ["train", "demo", *settings, "--runs", runs]
    assert tackboard(*every, *cut).code == 0
    night = [*every, "--set", "data.split=time", "--set", "data.cut=0.9", "--continue", runs / "latest"]
    looked = tackboard(*night, "--dry-run", "--json")
    assert looked.code == 0, looked.err
    shown = json.loads(tackboard(*night, "--print-config").out)
    assert shown["start"] == {"run": str(runs / "latest"), "prefix": "", "is_continued": True, "needs_run": False}
    answer = tackboard(*night, "--resume", "auto", "--json")
    assert answer.code == 0 and "nothing to resume" in answer.err, answer.err
    run = Path(answer.json()["run"])
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["data"]["predict_from"] == shown["data"]["predict_from"] != ""
    unbroken = {path.name: path.read_bytes() for path in (run / "checkpoints" / "latest").glob("*.safetensors")}
    # As if killed after its second step.
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "checkpoints" / "latest").unlink()
    (run / "STATUS").write_text("running\n")
    for resume in ("auto", str(run)):
        again = tackboard(*night, "--resume", resume, "--json")
        assert again.code == 0, again.err
        assert Path(again.json()["run"]) == run
    assert unbroken == {path.name: path.read_bytes() for path in (run / "checkpoints" / "latest").glob("*.safetensors")}
    exported = tackboard("export", run, "--out", tmp_path / "bundle")
    assert exported.code == 0, exported.err
    assert "It goes on with step 4 of run" in (tmp_path / "bundle" / "card.md").read_text()
    nothing = tackboard(*night)
    assert nothing.code == 3 and "has nothing new for" in nothing.err and len(nothing.err.splitlines()) <= 3
    everything = ["--set", "data.predict_from=1970-01-01"]
    for wrong, said in (
        (["--from", runs / "latest"], "are both given"),
        (["--set", "start.run=other"], "name different runs"),
        ([*everything, "--set", "model.tables.num_rows=24", "--dry-run"], "model.tables.num_rows is 24, but"),
    ):
        answer = tackboard(*night, *wrong)
        assert answer.code == 2 and said in answer.err, answer.err
        assert len(answer.err.partition("error: ")[2].splitlines()) <= 3


def test_from_is_start_run(
    tackboard: Program, settings: list[str], trained_run: RunDirectory, tiny_bundle: Path, tmp_path: Path
) -> None:
    place = str(trained_run.path)
    answer = tackboard("train", "demo", *settings, "--from", place, "--print-config")
    assert json.loads(answer.out)["start"]["run"] == place
    assert tackboard("train", "demo", "--from", place, "--set", f"start.run={place}", "--print-config").code == 0
    for wrong, said in (
        (["--from", place, "--set", "start.run=other"], "name different runs"),
        (["--from", place, "--dry-run"], "model.tables.num_hashes is 4, but"),
        (["--from", str(tiny_bundle), "--dry-run"], "tackboard export RUN --out BUNDLE --for-training"),
    ):
        answer = tackboard("train", "demo", *settings, *wrong, "--runs", tmp_path / "runs")
        assert answer.code == 2 and said in answer.err, answer.err
        assert len(answer.err.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()
