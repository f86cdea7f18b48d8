"""Rankers go the whole way by the commands: one of a user's own file, and ours on a pretrained model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_ranker.py"
OURS = """
from tackboard.data.request_loader import RequestConfig
from tackboard.models.ranker import HeadConfig, RankerConfig
from tackboard.train.config import RunConfig, StartConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

def recipe():
    return RunConfig(
        name="ours",
        data=RequestConfig(dataset="datasets/tiny", labels=("click",), max_history=12, tokens_per_step=512),
        model=RankerConfig.on(pretrained().model, HeadConfig(labels=("click",))),
        start=StartConfig(run="runs/latest", prefix="pinfm."),
        optimizer=OptimizerConfig(multipliers={"pinfm.": 0.1}),
        training=TrainingConfig(steps=4, checkpoint_every=2, validate_every=2, num_threads=1, device="cpu"),
    )
"""
REQUEST = {
    "history": [
        {"item": 100_000 + number, "action": "click", "surface": "home", "time_ms": 1_736_200_000_000 + 60_000 * number}
        for number in range(5)
    ],
    "candidates": [100_000 + number for number in range(40)],
}


@pytest.fixture(scope="module")
def labelled(workspace: Path, tackboard: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own with the workspace's dataset, labelled."""
    folder = tmp_path_factory.mktemp("ranked")
    settings = [word for s in ("num_users=60", "num_items=80", "num_topics=5") for word in ("--set", s)]
    for arguments in (
        ["data", "synth", "--name", "tiny", *settings, "--set", "median_events=12", "--set", "max_events=30"],
        ["data", "label", "datasets/tiny", "--label", "click=1h"],
    ):
        answer = tackboard(*arguments, cwd=folder)
        assert answer.code == 0, answer.err
    (folder / "request.json").write_text(json.dumps(REQUEST))
    return folder


@pytest.fixture(scope="module")
def own(labelled: Path, tackboard: Callable[..., Answer]) -> Path:
    """The same folder with the example's run and bundle."""
    settings = [
        "data.dataset=datasets/tiny",
        "training.steps=6",
        "training.validate_every=2",
        "data.tokens_per_step=512",
        "evaluation.item_time=birth_ms",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    trained = tackboard("train", f"{EXAMPLE}:recipe", "--runs", "own-runs", *options, "--json", cwd=labelled)
    assert trained.code == 0, trained.err
    exported = tackboard("export", "own-runs/latest", "--out", "own-bundle", cwd=labelled)
    assert exported.code == 0, exported.err
    return labelled


def scores_of(answer: Answer) -> dict[int, float]:
    assert answer.code == 0, answer.err
    return {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_it_is_judged_on_requests_of_held_out_users(own: Path, tackboard: Callable[..., Answer]) -> None:
    answer = tackboard("evaluate", "own-runs/latest", "--json", cwd=own)
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert [(row["label"], row["name"]) for row in result["rows"]] == [("click", "item mean"), ("click", "model")]
    assert 0 < result["num_users"] < 20, "a tenth of sixty users, by their ids"
    assert all(0 <= row["auc"] <= 1 and row["log_loss"] > 0 for row in result["rows"])
    wrong = tackboard("evaluate", "own-runs/latest", "--code", str(EXAMPLE.with_name("own_model.py")), cwd=own)
    assert wrong.code == 2 and "own_model.py has no config class TasteConfig" in wrong.err
    shown = tackboard("evaluate", "own-runs/latest", "--max-users", "2", cwd=own)
    assert "of 2 users" in shown.out
    assert "click, item mean" in shown.out and "auc_within_users" in shown.out
    assert all(0 <= row["hit@3"] <= 1 and row["ne"] > 0 and row["calibration"] > 0 for row in result["rows"])
    lines = shown.out.splitlines()
    ages = lines[lines.index("HIT@3 by item age (birth_ms)") :]
    assert ages[1].split("  ")[-1].strip() == "unknown" and "under 7 days" in ages[1]
    assert [line[:17].rstrip() for line in ages[2:]] == ["click, item mean", "click, model", "click, requests"]
    assert ages[-1].split()[-1] == "0" and ages[-2].split()[-1] == "-", "no item of the world is without a birth"
    assert {row["age"] for row in result["ages"]} == {"under 7 days", "7 to 28 days", "28 days or more", "unknown"}
    without = tackboard("evaluate", "own-runs/latest", "--item-time", "", "--json", cwd=own)
    assert json.loads(without.out)["ages"] == [] and json.loads(without.out)["rows"] == result["rows"]
    wrong = tackboard("evaluate", "own-runs/latest", "--item-time", "birth", cwd=own)
    assert wrong.code == 2 and "birth_ms" in wrong.err and len(wrong.err.splitlines()) <= 3, wrong.err
    refused = tackboard("evaluate", "own-runs/latest", "--filter-seen", cwd=own)
    assert refused.code == 2 and "do not apply to a ranker" in refused.err and len(refused.err.splitlines()) <= 3
    elsewhere = tackboard("evaluate", "own-runs/latest", "--dataset", "datasets/tiny", "--json", cwd=own)
    assert json.loads(elsewhere.out)["num_users"] > result["num_users"], "of a dataset that is named, all users"


@pytest.fixture(scope="module")
def url(own: Path, serving: Callable[..., Any]) -> Iterator[str]:
    with serving(own / "own-bundle", EXAMPLE) as address:
        yield address


def test_the_server_gives_the_offline_scores(own: Path, url: str, tackboard: Callable[..., Answer]) -> None:
    served = scores_of(tackboard("score", "request.json", "--url", url, "--json", cwd=own))
    offline = ["score", "request.json", "--offline", "--bundle", "own-bundle", "--code", str(EXAMPLE), "--json"]
    expected = scores_of(tackboard(*offline, cwd=own))
    assert set(served) == set(REQUEST["candidates"])
    assert len(set(served.values())) > 30
    assert max(abs(served[item] - expected[item]) for item in expected) <= 1e-5 * max(map(abs, expected.values()))


def test_predictions_are_the_scores_of_the_server(own: Path, url: str, tackboard: Callable[..., Answer]) -> None:
    asked = ["predict", "datasets/tiny", "--bundle", "own-bundle", "--out", "predicted"]
    refused = tackboard(*asked, cwd=own)
    assert refused.code != 0 and "--code" in refused.err and not (own / "predicted").exists()
    written = tackboard(*asked, "--code", str(EXAMPLE), "--json", cwd=own)
    assert written.code == 0, written.err
    rows = pq.read_table(own / "predicted" / "scores").to_pylist()
    assert len(rows) == json.loads(written.out)["num_candidates"]
    events = pq.read_table(own / "datasets" / "tiny" / "latest" / "events.parquet").to_pylist()
    last = max(rows, key=lambda row: int(row["time_ms"]))
    seen = [e for e in events if e["user_id"] == last["user_id"] and e["received_ms"] < last["time_ms"]]
    mine = [row for row in rows if row["request"] == last["request"]]
    names = {"item": "item_id", "action": "action", "surface": "surface", "time_ms": "time_ms"}
    request = {
        "history": [{name: event[column] for name, column in names.items()} for event in seen],
        "candidates": [row["item_id"] for row in mine],
        "request_time_ms": last["time_ms"],
    }
    (own / "last.json").write_text(json.dumps(request))
    served = scores_of(tackboard("score", "last.json", "--url", url, "--json", cwd=own))
    assert seen and len(mine) > 1
    assert {row["item_id"]: row["score"] for row in mine} == pytest.approx(served, rel=1e-4, abs=1e-5)


def test_ours_begins_as_pretrained_and_goes_the_same_way(
    labelled: Path, workspace: Path, tackboard: Callable[..., Answer]
) -> None:
    pretrained = (workspace / "recipe.py").read_text()
    (labelled / "recipe.py").write_text(pretrained)
    (labelled / "ours.py").write_text(pretrained.replace("def recipe()", "def pretrained()") + OURS)
    for arguments in (
        ["train", "recipe.py:recipe"],
        ["train", "ours.py:recipe", "--json"],
        ["evaluate", "runs/latest"],
        ["export", "runs/latest", "--out", "ranked-bundle"],
        ["score", "request.json", "--offline", "--bundle", "ranked-bundle"],
    ):
        answer = tackboard(*arguments, cwd=labelled)
        assert answer.code == 0, answer.err
    events = (labelled / "runs" / "latest" / "events.jsonl").read_text()
    start = json.loads(next(line for line in events.splitlines() if '"start"' in line))
    assert 0 < start["parameters_taken"] < start["parameters"]
    assert (labelled / "runs" / "latest" / "checkpoints" / "best").is_symlink()


def test_a_run_and_a_bundle_of_it_start_the_same_ranker(
    labelled: Path, workspace: Path, tackboard: Callable[..., Answer]
) -> None:
    """All by the commands: train, export --for-training, verify, train --from, evaluate, export."""
    pretrained = (workspace / "recipe.py").read_text()
    (labelled / "recipe.py").write_text(pretrained)
    ours = OURS.replace('StartConfig(run="runs/latest", prefix="pinfm.")', "StartConfig()")
    (labelled / "ours.py").write_text(pretrained.replace("def recipe()", "def pretrained()") + ours)
    ranker = ["train", "ours.py:recipe"]
    for arguments in (
        ["train", "recipe.py:recipe", "--runs", "first"],
        ["export", "first/latest", "--out", "to-train", "--for-training"],
        ["verify", "to-train"],
        ["export", "first/latest", "--out", "to-serve"],
        ["score", "request.json", "--offline", "--bundle", "to-train"],
        [*ranker, "--from", "to-train", "--dry-run"],
        [*ranker, "--from", "to-train", "--runs", "of-bundle"],
        [*ranker, "--from", "first/latest", "--runs", "of-run"],
        [*ranker, "--from", "first/latest", "--runs", "of-run", "--resume", "of-run/latest"],
        ["evaluate", "of-bundle/latest"],
        ["export", "of-bundle/latest", "--out", "started"],
    ):
        answer = tackboard(*arguments, cwd=labelled)
        assert answer.code == 0, answer.err
    for step in ("step-00000002", "step-00000004"):
        for file in ("dense", "tables", "optimizer"):
            one, other = (labelled / runs / "latest" / "checkpoints" / step for runs in ("of-run", "of-bundle"))
            assert (one / f"{file}.safetensors").read_bytes() == (other / f"{file}.safetensors").read_bytes()
    name = (labelled / "first" / "latest").resolve().name
    card = (labelled / "started" / "card.md").read_text()
    assert f"The parameters under `pinfm.` were initialised from step 4 of run `{name}`" in card
    assert "the log odds of click" in card and "not probabilities" not in card
    for wrong, said in (
        (["to-serve"], "tackboard export RUN --out BUNDLE --for-training"),
        (["to-train", "--set", "start.run=first/latest"], "name different runs"),
        (["to-train", "--set", "model.tables.num_rows=128"], "model.tables.num_rows is 128, but to-train was trained"),
        (["datasets/tiny"], "datasets/tiny is a dataset"),
        (["nowhere"], "nowhere does not exist"),
    ):
        answer = tackboard(*ranker, "--from", *wrong, "--runs", "wrong", cwd=labelled)
        assert answer.code == (3 if len(wrong) == 1 and "--" not in said else 2), answer.err
        assert said in answer.err and len(answer.err.splitlines()) <= 3, answer.err
    assert not (labelled / "wrong").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('data.labels=["clic"]', "did you mean click?"),
        ("data.max_history=5", "as model.max_history"),
        ("data.test_share=1.5", "the other users"),
        ("start.run=runs/nowhere", "does not exist"),
        ("training.validate_every=0", "--set training.validate_every=100"),
        ("optimizer.multipliers.tables.=0.1", "--set 'optimizer.multipliers={\"tables.\": 0.1}'"),
        ("optimizer.multipliers=0.1", "a table in JSON"),
        ("data.dataset=datasets/none", "datasets/none"),
    ],
)
def test_what_is_wrong_is_said_in_three_lines(
    labelled: Path, tackboard: Callable[..., Answer], setting: str, said: str
) -> None:
    answer = tackboard(
        "train", f"{EXAMPLE}:recipe", "--set", "data.dataset=datasets/tiny", "--set", setting, cwd=labelled
    )
    assert answer.code in (2, 3)
    assert said in answer.err and len(answer.err.splitlines()) <= 3


def test_requests_that_are_not_labelled_say_what_to_type(workspace: Path, tackboard: Callable[..., Answer]) -> None:
    answer = tackboard("train", f"{EXAMPLE}:recipe", "--set", "data.dataset=datasets/tiny", "--dry-run", cwd=workspace)
    assert answer.code == 3
    assert "tackboard data label datasets/tiny --label" in answer.err
