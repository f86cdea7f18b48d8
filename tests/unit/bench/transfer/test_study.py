"""The study of transfer: which cells it plans, and how it reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.report import charts, protocol
from tackboard.bench.quality.study_plan import Options, StudyContext, StudyPlan, find_study
from tackboard.bench.transfer.fit import ARMS
from tackboard.bench.transfer.study import SIZES, compare_arms, measure
from tackboard.core.errors import UsageError
from tackboard.evaluation.labelled_requests import METRICS
from tackboard.events.dataset import open_dataset

ENVIRONMENT = {"commit": "none"}


@pytest.fixture
def work(made_up_ratings: Callable[[Path], None], tmp_path: Path) -> Work:
    work = Work.open(tmp_path / "work")
    made_up_ratings(work.datasets / "ml-1m-file")
    return work


def plan_of(work: Work, study: str = "transfer", **options: Any) -> StudyPlan:
    return find_study(study)(StudyContext(work, find_bench("ml-1m"), Options(study=study, **options)))


def test_arms_differ_in_nothing_but_where_they_begin(work: Work) -> None:
    plan = plan_of(work)
    pretrained = [cell for cell in plan.cells if cell.stage == "pretrain"]
    assert [cell.seed for cell in pretrained] == [0, 1, 2]
    assert {cell.prepared for cell in pretrained} == {"ml-1m-file-first70"}
    arms = [cell for cell in plan.cells if cell.stage == "transfer"]
    assert len(arms) == len(SIZES) * len(ARMS) * 3
    for cell in arms:
        twin = next(one for one in pretrained if one.seed == cell.seed)
        assert cell.prepared == "ml-1m-file"
        assert cell.config == twin.config, "the same model, from scratch too"
        assert cell.after == (None if cell.protocol["arm"] == "scratch" else twin)
    shared = [
        {key: value for key, value in cell.protocol.items() if key not in ("arm", "num_examples")} for cell in arms
    ]
    assert all(one == shared[0] for one in shared)
    assert len({cell.name for cell in plan.cells}) == len(plan.cells)


def test_both_attempts_share_pretraining_and_means(work: Work) -> None:
    first, second = ({cell.name for cell in plan_of(work, study).cells} for study in ("transfer", "transfer-hidden"))
    assert len(first & second) == 4


def test_pretraining_never_sees_what_is_judged(work: Work) -> None:
    plan_of(work)
    whole, part = (open_dataset(work.datasets / name).read_events() for name in ("ml-1m-file", "ml-1m-file-first70"))
    first_judged: dict[int, int] = {}
    for user in set(whole["user_id"].to_pylist()):
        times = np.sort(whole["time_ms"].to_numpy()[whole["user_id"].to_numpy() == user])
        first_judged[user] = int(times[int(len(times) * 0.7)])
    latest = zip(part["user_id"].to_pylist(), part["time_ms"].to_pylist(), strict=True)
    assert all(time < first_judged[user] for user, time in latest)


def test_what_cannot_be_transferred_is_refused(work: Work) -> None:
    with pytest.raises(UsageError, match="kakao-brunch"):
        find_study("transfer")(StudyContext(work, find_bench("kakao-brunch"), Options(study="transfer")))
    with pytest.raises(UsageError, match="--methods sasrec"):
        plan_of(work, methods=("sasrec",))
    with pytest.raises(UsageError, match="one PinFM"):
        plan_of(work, methods=("pinfm-history", "pinfm-request"))
    with pytest.raises(UsageError, match="takes one tie rule"):
        plan_of(work, ties=("file", "random"))
    trial = StudyContext(Work(work.root / "absent"), find_bench("ml-1m"), Options(study="transfer"), is_trial=True)
    assert find_study("transfer")(trial).cells and not trial.work.root.exists()


def save(work: Work, cell: Cell, value: float, num_examples: int) -> None:
    """A finished arm whose metrics are `value`, with draws around it that every arm shares."""
    noise = np.random.default_rng(0).normal(size=1000) * 0.01
    arrays = {f"draws_{metric}": (value + noise).astype(np.float32) for metric in METRICS}
    facts = {"num_train": 150, "num_validation": 40, "num_test": 110, "num_test_users": 30, "share_yes": 0.5}
    fit = {"validation_log_loss": 0.5, "learning_rate": 1e-3, "steps": 20, "epochs": 1.0, "seconds": 3.0}
    values = {"metrics": dict.fromkeys(METRICS, value), "num_examples": num_examples, "device": "cpu"}
    work.save(cell, {**values, **facts, **fit}, arrays)


def test_the_table(work: Work) -> None:
    plan = plan_of(work)
    empty = plan.table(work.find)
    assert all(not part["rows"] for part in empty["sections"]) and empty["charts"] == []
    levels = {"fine-tuned": 0.75, "frozen": 0.70, "scratch": 0.70}
    for cell in plan.cells:
        if cell.stage == "transfer":
            size = cell.protocol["num_examples"] or 150_000
            save(work, cell, levels[cell.protocol["arm"]] + 0.001 * cell.seed, size)
    table = plan.table(work.find)
    assert "Examples come after" in table["protocol"] and "The 30 test users are not" in table["protocol"]
    by_title = {part["title"]: part for part in table["sections"]}
    means = by_title["Test, mean over seeds"]["rows"]
    assert means[0] == ["1,000", "pretrained, fine-tuned", "3", "0.7510", "0.7510", "0.7510"]
    found = {
        (one["num_examples"], one["arm"], one["against"], one["metric"]): one for one in table["figures"]["differences"]
    }
    best = found[1_000, "fine-tuned", "scratch", "auc"]
    # Draws are paired: what every arm shares drops out.
    assert best["difference"] == pytest.approx(0.05) and best["low"] == pytest.approx(0.05, abs=1e-4)
    assert best["verdict"] == "agree"
    assert found[1_000, "fine-tuned", "scratch", "log_loss"]["verdict"] == "disagree", "lower would be better"
    assert found[1_000, "frozen", "scratch", "auc"]["verdict"] == "within noise", "no direction was published"
    assert empty["notes"] == [] and any("tries 2 rates" in note for note in table["notes"])
    first, second = (part for title, part in by_title.items() if title.startswith("Differences"))
    assert first["title"].startswith("Differences of auc, the metric that decides") and {
        row[1] for row in first["rows"]
    } == {"auc"}
    assert {row[1] for row in second["rows"]} == set(METRICS) - {"auc"}
    [chart] = table["charts"]
    assert [line["name"] for line in chart["lines"]] == list(ARMS.values())
    assert all(len(line["x"]) == 4 for line in chart["lines"])
    assert set(charts({"table": table})) == {"auc"}
    assert protocol({"table": table}) == table["protocol"], "not that of a ranking"
    assert json.loads(json.dumps(table)) == table


def test_sizes_beyond_all_examples_are_not_shown_again(work: Work) -> None:
    plan = plan_of(work, seeds=1)
    for cell in plan.cells:
        if cell.stage == "transfer":
            save(work, cell, 0.7, min(cell.protocol["num_examples"] or 10_000, 10_000))
    table = plan.table(work.find)
    sizes = [row[0] for row in table["sections"][0]["rows"]]
    assert sizes == [size for size in ("1,000", "5,000", "10,000") for _ in ARMS]
    assert all(len(line["x"]) == 3 for line in table["charts"][0]["lines"])


def test_arms_with_all_examples_are_compared_to_means(work: Work) -> None:
    plan = plan_of(work, seeds=1)
    for cell in plan.cells:
        if cell.stage == "transfer" and not cell.protocol["num_examples"]:
            save(work, cell, 0.75 if cell.protocol["arm"] == "fine-tuned" else 0.7, 150)
    means = next(cell for cell in plan.cells if cell.stage == "transfer-means")
    row = {"with_users": True, "all_known": True, "num_examples": 680, "metrics": dict.fromkeys(METRICS, 0.7)}
    draws = {f"draws_{metric}": np.linspace(0.69, 0.71, 1000, dtype=np.float32) for metric in METRICS}
    work.save(means, {"means": [row], "num_train": 1, "num_validation": 1, "num_test": 1, "num_test_users": 1,
                      "share_yes": 0.5}, draws)  # fmt: skip
    table = plan.table(work.find)
    found = {
        (one["arm"], one["metric"]): one["verdict"]
        for one in table["figures"]["differences"]
        if one["against"] == "means"
    }
    assert found["fine-tuned", "auc"] == "better, one seed" and found["fine-tuned", "log_loss"] == "worse, one seed"
    assert found["frozen", "auc"] == found["scratch", "log_loss"] == "within noise"


def test_unfinished_pairs_are_not_compared(work: Work) -> None:
    plan = plan_of(work)
    cell = next(cell for cell in plan.cells if cell.protocol.get("arm") == "frozen")
    save(work, cell, 0.7, 1_000)
    result = work.find(cell)
    assert result is not None
    assert compare_arms({(1_000, "frozen"): [result]}, {}) == []
    assert measure([result], [result], "auc").difference == 0.0
