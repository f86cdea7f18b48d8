"""`tackboard evaluate`: the table for people and for machines, on the run's data or on other data."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.cli.evaluate import _gap_sentence
from tackboard.core.rundir import RunDirectory
from tackboard.data.config import PartOfUsers
from tackboard.data.source import open_sequences
from tackboard.train.config import RunConfig, config_to_json, features_for
from tackboard.train.trainer import Trainer

Program = Callable[..., Any]
BASELINES = ["popularity", "item-to-item", "recently seen", "recent, live"]


@pytest.fixture
def run(trained_run: RunDirectory, tmp_path: Path) -> Path:
    """A copy of the trained run: evaluating writes into it."""
    shutil.copytree(trained_run.path, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_json_holds_every_row_and_is_kept_with_the_run(tackboard: Program, run: Path) -> None:
    answer = tackboard("evaluate", run, "--json")
    assert answer.code == 0, answer.err
    result = answer.json()
    assert [row["name"] for row in result["rows"]] == [*BASELINES, "model"]
    figures = {"hr@1", "hr@5", "ndcg@1", "ndcg@5", "mrr", "recall@10", "coverage@10", "novelty@10", "repeats@10"}
    assert set(result["rows"][0]) == {"name"} | figures
    assert (result["num_users"], result["num_items"], result["filter_seen"]) == (14, 24, False)
    assert result["gap_closed"] is None  # no oracle for real data
    assert (result["held_out"], result["step"]) == (1, 6)
    assert json.loads((run / "eval" / "metrics.json").read_text()) == result
    assert answer.err.count("ranking by") == 5
    assert Path(result["page"]).read_text().startswith("<!doctype html>")


def test_the_table_for_people_says_the_protocol(tackboard: Program, run: Path) -> None:
    lines = tackboard("evaluate", run, "--filter-seen", "--max-users", "5").out.splitlines()
    assert lines[0] == "5 users, 24 items; leave-last-out, full catalogue, ties against the target; step 6"
    assert lines[1] == "items of the history are taken out of the ranking"
    assert lines[2].split() == ["hr@1", "hr@5", "ndcg@1", "ndcg@5"]
    names = [*BASELINES, "model"]
    assert [line[:14].rstrip() for line in lines[3:8]] == names
    assert lines[8].split() == ["mrr", "recall@10", "coverage@10", "novelty@10", "repeats@10"]
    assert [line[:14].rstrip() for line in lines[9:14]] == names
    assert re.fullmatch(r"recent, live: counts the events of \d+ hours, the best window on earlier events", lines[14])
    assert lines[-1].startswith("slices and plots: ") and lines[-1].endswith(".html")


def test_item_ages_are_for_rankers(tackboard: Program, run: Path) -> None:
    answer = tackboard("evaluate", run, "--item-time", "birth_ms")
    assert answer.code == 2
    assert "--item-time applies only to a ranker" in answer.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_device_that_is_not_there_is_refused(tackboard: Program, run: Path) -> None:
    answer = tackboard("evaluate", run, "--device", "cuda")
    assert answer.code == 2
    assert "--device = cuda, but torch sees no GPU" in answer.err
    assert "--device cpu" in answer.err
    answer = tackboard("evaluate", run, "--device", "gpu")
    assert answer.code == 2
    assert "--device gpu is no device" in answer.err
    assert tackboard("evaluate", run, "--device", "cpu", "--max-users", "2").code == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_a_gpu_ranks_as_the_cpu(tackboard: Program, run: Path) -> None:
    on_cpu, on_gpu = (tackboard("evaluate", run, "--device", device, "--json").json() for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu["rows"], on_gpu["rows"], strict=True):
        assert one == pytest.approx(other, abs=0.08)  # one user of 14


def test_every_step_that_was_evaluated_keeps_its_figures(
    tackboard: Program, tmp_path: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    """Of a run that validates: the table says that it is not the last event that was ranked."""
    config = tiny_config("data.held_out=2", "training.steps=2", "training.checkpoint_every=1")
    source = open_sequences(
        config.data.dataset, config.data.positive_actions, features=features_for(config), held_out=2
    )
    run = RunDirectory.create(tmp_path, config.name, config_to_json(config))
    Trainer(config, run, source).train(quiet=True)
    folder = run.path / "eval"
    for step in (2, 1):
        answer = tackboard("evaluate", run.checkpoints / f"step-{step:08d}")
        assert "; validation: the last positive event but one, full catalogue, ties" in answer.out, answer.err
        assert answer.out.splitlines()[0].endswith(f"; step {step}")
    kept = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    names = [f"step-0000000{step}_last-but-1_all-items_at-1-5_of-{source.snapshot}" for step in (1, 2)]
    assert sorted(kept) == ["metrics.json", *(f"{name}.json" for name in names)]
    assert kept["metrics.json"] == kept[f"{names[0]}.json"]  # what was evaluated last
    assert [kept[f"{name}.json"]["step"] for name in names] == [1, 2]
    assert sorted(path.name for path in folder.glob("*.html")) == [f"{name}.html" for name in names]
    assert {result["held_out"] for result in kept.values()} == {2}


@pytest.mark.parametrize(
    ("closed", "sentence"),
    [
        (0.414, "the model goes 41% of the way from the better baseline to the oracle (HR@10)"),
        (-1.73, "the model is worse than the better baseline, by 173% of this baseline's gap to the oracle (HR@10)"),
    ],
)
def test_how_far_the_model_is_from_the_oracle(closed: float, sentence: str) -> None:
    assert _gap_sentence(closed) == sentence


def test_other_data_is_read_with_the_models_vocabulary(
    tackboard: Program, run: Path, tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    """Actions that sort before the known ones, and more of them: none may be taken for another."""
    log = [
        (user, item, action, "home", 10 * item)
        for user in range(3)
        for item, action in enumerate(["click", "aa", "save", "ab", "ac", "ad", "ae", "click"])
    ]
    other = make_dataset(tmp_path, log, name="other")
    answer = tackboard("evaluate", run, "--dataset", other, "--json")
    assert answer.code == 0, answer.err
    assert answer.json()["num_users"] == 3
    assert "warning: actions that training never saw count as unknown: aa, ab, ac, ad, ae\n" in answer.err
    assert "surfaces that" not in answer.err
    renamed = [
        (user, item, action.replace("a", "x") if len(action) == 2 else action, *rest)
        for user, item, action, *rest in log
    ]
    same = tackboard("evaluate", run, "--dataset", make_dataset(tmp_path, renamed, name="renamed"), "--json")
    assert same.json()["rows"] == answer.json()["rows"]


STREAM = {
    "data.law.num_items": 600,
    "data.law.num_topics": 6,
    "data.law.max_events": 16,
    "data.law.mean_events": 8,
    "data.law.num_users": 10_000,
    "data.law.num_test_users": 60,
    "data.tokens_per_step": 128,
    "data.uniform_negatives": 16,
    "data.evaluated_items": 100,
    "model.max_history": 16,
    "model.tables.num_rows": 50,
    "model.tables.dim": 2,
    "model.width": 8,
    "training.num_threads": 1,
    "training.device": "cpu",
}


def test_a_run_on_a_stream_is_trained_and_compared_with_the_exact_oracle(
    tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [argument for key, value in STREAM.items() for argument in ("--set", f"{key}={value}")]
    looked = tackboard("train", "published-small", *settings, "--dry-run", "--json").json()
    assert (looked["items"], looked["users"], looked["first_loss_expected"]) == (600, 10_000, 6.4)
    trained = tackboard("train", "published-small", *settings, "--fast-dev-run", "--json")
    assert trained.code == 0, trained.err
    assert trained.json()["evaluated_users"] <= 32 and 0 < trained.json()["rows_moved_share"] <= 1
    run = trained.json()["run"]
    result = tackboard("evaluate", run, "--json").json()
    losses = {row["name"]: row["log_loss"] for row in result["rows"]}
    assert list(losses) == ["popularity", "model", "oracle"] and losses["oracle"] < losses["popularity"]
    shown = tackboard("evaluate", run)
    assert "softmax over a fixed sample" in shown.out and "(log-loss)" in shown.out, shown.err
    for option, word in ((["--filter-seen"], "users return to items"), (["--dataset", "d"], "leave out --dataset")):
        refused = tackboard("evaluate", run, *option)
        assert refused.code == 2 and word in refused.err


CUT = "2024-05-03T12:00:00"


@pytest.fixture
def run_by_time(tmp_path: Path, make_timed: Callable[..., Path], tiny_config: Callable[..., RunConfig]) -> Path:
    """A run that was trained on a log until its cut."""
    dataset = make_timed(tmp_path / "own", 1)
    config = tiny_config(f"data.dataset={dataset}", "data.split=time", f"data.cut={CUT}", "training.steps=2")
    run = RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
    Trainer(config, run, config.data.open(features_for(config))).train(quiet=True)
    return run.path


def test_a_run_by_time_is_judged_after_its_cut(tackboard: Program, run_by_time: Path) -> None:
    answer = tackboard("evaluate", run_by_time)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert f"each user's first positive event from {CUT} on, training before {CUT}, full catalogue" in lines[0]
    assert [line[:14].rstrip() for line in lines[3:9]] == [*BASELINES, "recent, frozen", "model"]
    assert "of the judged events are on items that training never saw, so the model knows nothing of them" in answer.out
    assert "recent, frozen: counts the events of" in answer.out


def test_every_way_of_judging_has_its_own_files(
    tackboard: Program, run_by_time: Path, tmp_path: Path, make_timed: Callable[..., Path]
) -> None:
    """Other cutoffs, seen items, events, cuts, users or datasets overwrite nothing; the same ones overwrite their own
    files."""
    other = make_timed(tmp_path / "other", 1, 77)
    folder = run_by_time / "eval"
    kept: dict[str, bytes] = {}
    ways: list[list[Any]] = [
        [],
        ["--cutoffs", "10,2,10"],
        ["--filter-seen"],
        ["--judged", "last"],
        ["--judged", "all"],
        ["--cut", "2024-05-04"],
        ["--cut", "2024-05-04", "--judged", "all"],
        ["--max-users", "3"],
        ["--dataset", other],
        ["--dataset", other, "--cut", "2024-05-04"],
    ]
    for number, way in enumerate(ways, start=1):
        answer = tackboard("evaluate", run_by_time, *way, "--json")
        assert answer.code == 0, answer.err
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "metrics.json"}
        assert len(found) == 2 * number, way  # a file of figures and a page
        assert {name: found[name] for name in kept} == kept
        kept = found
        result = answer.json()
        assert json.loads((folder / "metrics.json").read_text()) == result
        assert json.loads(Path(result["page"]).with_suffix(".json").read_text()) == result
    assert tackboard("evaluate", run_by_time, "--cutoffs", "2,10").code == 0
    assert len(list(folder.iterdir())) == 2 * len(ways) + 1


def test_a_run_is_not_judged_on_what_it_was_trained_on(
    tackboard: Program, run_by_time: Path, run: Path, tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    refused = tackboard("evaluate", run_by_time, "--cut", "2024-05-03T11:00:00")
    assert refused.code == 2
    assert f"--cut 2024-05-03T11:00:00 lies before the end of training, {CUT}" in refused.err
    said = [line for line in refused.err.splitlines() if not line.startswith("warning: ")]
    assert len(said) <= 3 and not (run_by_time / "eval").exists()
    # A run that held out each user's last event has read events until the end of its log.
    refused = tackboard("evaluate", run, "--cut", "1970-01-01T01:00:00")
    assert refused.code == 2 and "lies before the end of training, 1970-01-01T04:1" in refused.err, refused.err
    hour = 3_600_000
    actions = ["click", "save"]
    later = [
        (user, item, actions[item % 2], "home", (10 + item) * hour + user)
        for user in range(100, 110)
        for item in range(8)
    ]
    newer = make_dataset(tmp_path, later, name="newer")
    accepted = tackboard("evaluate", run, "--dataset", newer, "--cut", "1970-01-01T15:00:00", "--json")
    assert accepted.code == 0, accepted.err
    result = accepted.json()
    assert (result["split"], result["judged"], result["num_events"]) == ("time", "first", 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cutoffs", "5,,10"], "--cutoffs 5,,10 is no list of whole numbers"),
        (["--cutoffs", "0"], "--cutoffs 0 is no list of whole numbers"),
        (["--cutoffs", "ten"], "such as 5,10,100"),
        (["--cutoffs", ""], "is no list of whole numbers"),
        (["--cutoffs", ",".join(map(str, range(1, 14)))], "1 to 12 positive numbers"),
        (["--judged", "some"], "first, last, all"),
        (["--cut", "soon"], "data.cut=soon is not an instant"),
        (["--cut", "2031-01-01"], "leaves no event after it"),
        (["--cut", "1.0"], "leaves no event after it"),
        (["--cut", ""], "--cut is empty"),
    ],
)
def test_wrong_options_are_refused(tackboard: Program, run_by_time: Path, options: list[str], words: str) -> None:
    answer = tackboard("evaluate", run_by_time, *options)
    assert answer.code == 2 and words in answer.err, answer.err
    assert len(answer.err.strip().splitlines()) <= 3 and not (run_by_time / "eval").exists()


def test_without_a_cut_there_is_nothing_to_choose(tackboard: Program, run: Path) -> None:
    answer = tackboard("evaluate", run, "--judged", "all")
    assert answer.code == 2 and "--judged applies only to a split by time" in answer.err
    assert "--cut INSTANT" in answer.err


def log_of(counts: dict[int, int], last: int, users: range) -> list[tuple[Any, ...]]:
    """Users with the same history: `counts` says how often they clicked each item. Their last click is `last`."""
    items = [item for item, count in counts.items() for _ in range(count)] + [last]
    return [
        (user, item, "save" if time % 2 else "click", "home", 1000 * time)
        for user in users
        for time, item in enumerate(items)
    ]


def test_popularity_counts_what_the_run_was_trained_on(
    tackboard: Program, tmp_path: Path, make_dataset: Callable[..., Path], tiny_config: Callable[..., RunConfig]
) -> None:
    """The own log and the judged log prefer other items. The own log's users of validation prefer a third item."""
    part = PartOfUsers("train", 0.5)
    users = np.arange(100, 140)
    is_trained = part.of(users)
    own = [row for user in users[is_trained] for row in log_of({1: 4, 2: 1, 3: 1}, 2, range(user, user + 1))]
    own += [row for user in users[~is_trained] for row in log_of({3: 30}, 3, range(user, user + 1))]
    own_dataset = make_dataset(tmp_path, own, name="own")
    config = tiny_config(f"data.dataset={own_dataset}", "data.validation_share=0.5", "training.steps=1")
    run = RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
    Trainer(config, run, config.data.open(features_for(config))).train(quiet=True)
    judged = make_dataset(tmp_path, log_of({2: 5, 3: 2}, 1, range(200, 210)), name="judged")

    def popularity(answer: Any) -> dict[str, float]:
        assert answer.code == 0, answer.err
        found: dict[str, float] = answer.json()["rows"][0]
        return found

    answer = tackboard("evaluate", run.path, "--dataset", judged, "--json")
    assert "warning" not in answer.err and popularity(answer)["hr@1"] == 1.0
    # All own users' events: item 3 would be the most popular one, if users of validation counted.
    own_row = popularity(tackboard("evaluate", run.path, "--json"))
    assert own_row["hr@1"] == 0.0 and own_row["novelty@10"] > 0
    # Without the own snapshot, the judged log is counted, with a warning.
    shutil.rmtree(own_dataset)
    answer = tackboard("evaluate", run.path, "--dataset", judged, "--json")
    assert "warning: the baselines are fitted on the judged dataset, not on the dataset of the run: " in answer.err
    assert popularity(answer)["hr@1"] == 0.0
    gone = tackboard("evaluate", run.path)
    assert gone.code != 0 and str(own_dataset) in gone.err


def test_a_run_by_time_whose_own_log_is_gone_is_judged_on_a_newer_one(
    tackboard: Program, run_by_time: Path, tmp_path: Path, make_timed: Callable[..., Path]
) -> None:
    newer = make_timed(tmp_path / "newer", 1, 78)
    shutil.rmtree(tmp_path / "own")
    accepted = tackboard("evaluate", run_by_time, "--dataset", newer, "--cut", "2024-05-04", "--json")
    assert accepted.code == 0 and "warning: the baselines are fitted on the judged dataset" in accepted.err
    refused = tackboard("evaluate", run_by_time, "--dataset", newer, "--cut", "2024-05-03")
    assert refused.code == 2 and "lies before the end of training" in refused.err  # The run itself knows its cut.
