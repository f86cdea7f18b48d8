"""The study of transfer: which cells it plans, and how it reads them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality.cell import Machine, run_cell
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.report import charts, protocol
from tackboard.bench.quality.study_plan import Options, StudyContext, StudyPlan, find_study
from tackboard.bench.transfer.count_baselines import TITLES
from tackboard.bench.transfer.fit import ARMS
from tackboard.bench.transfer.study import EXAMPLES, compare_arms, measure, strongest_baseline
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
    assert [cell.seed for cell in pretrained] == [0, 1, 2, 3, 4]
    assert {cell.prepared for cell in pretrained} == {"ml-1m-file-first70"}
    arms = [cell for cell in plan.cells if cell.stage == "transfer"]
    assert len(arms) == len(EXAMPLES) * len(ARMS) * 5
    for cell in arms:
        twin = next(one for one in pretrained if one.seed == cell.seed)
        assert cell.prepared == "ml-1m-file"
        assert cell.config == twin.config, "the same model, from scratch too"
        assert cell.after == (None if cell.protocol["arm"] == "scratch" else twin)
    shared = [{key: value for key, value in cell.protocol.items() if key not in ("arm", "share")} for cell in arms]
    assert all(one == shared[0] for one in shared)
    assert len({cell.name for cell in plan.cells}) == len(plan.cells)


def test_both_attempts_share_pretraining_and_baselines(work: Work) -> None:
    first, second = ({cell.name for cell in plan_of(work, study).cells} for study in ("transfer", "transfer-hidden"))
    assert len(first & second) == 5 + 5 + 5 + 1, "pretraining; baselines on a tenth, a third and all"


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


FACTS = {"num_train": 150, "num_validation": 40, "num_test": 110, "num_test_users": 30, "share_yes": 0.5}
NOISE = np.random.default_rng(0).normal(size=1000) * 0.01


def save(work: Work, cell: Cell, value: float) -> None:
    """A finished arm whose metrics are `value`, with draws around it that every arm shares."""
    arrays = {f"draws_{metric}": (value + NOISE).astype(np.float32) for metric in METRICS}
    fit = {"validation_log_loss": 0.5, "steps": 20, "epochs": 1.0, "seconds": 3.0, "tries": 12}
    settings = {"learning_rate": 1e-3, "dropout": 0.1, "weight_decay": 0.0, "device": "cpu"}
    values = {"metrics": dict.fromkeys(METRICS, value), "num_examples": round(1_500 * cell.protocol["share"])}
    work.save(cell, {**values, **FACTS, **fit, **settings}, arrays)


def save_baselines(work: Work, cell: Cell, levels: dict[str, float]) -> None:
    rows = {
        name: {"metrics": dict.fromkeys(METRICS, value), "settings": "", "tries": 3, "validation_log_loss": 0.5}
        for name, value in levels.items()
    }
    arrays = {f"draws_auc_{name}": (value + NOISE).astype(np.float32) for name, value in levels.items()}
    work.save(
        cell, {"rows": rows, "num_examples": round(1_500 * cell.protocol["share"]), **FACTS, "seconds": 1.0}, arrays
    )


def test_the_table(work: Work) -> None:
    plan = plan_of(work)
    empty = plan.table(work.find)
    assert all(not part["rows"] for part in empty["sections"]) and empty["charts"] == [] and empty["notes"] == []
    levels = {"fine-tuned": 0.75, "frozen": 0.70, "scratch": 0.70}
    for cell in plan.cells:
        if cell.stage == "transfer":
            save(work, cell, levels[cell.protocol["arm"]] + 0.001 * cell.seed)
        elif cell.stage == "transfer-baselines":
            save_baselines(work, cell, {"means": 0.6, "logistic": 0.74, "trees": 0.73})
    table = plan.table(work.find)
    assert "Examples come after" in table["protocol"] and "The 30 test users are not" in table["protocol"]
    assert "of which 55 are yes (50.0%)" in table["protocol"]
    by_title = {part["title"]: part for part in table["sections"]}
    means = by_title["Test, mean over seeds"]["rows"]
    assert means[0] == ["150", "pretrained, fine-tuned", "12", "5", "0.7520", "0.7520", "0.7520", ""]
    assert [row[1] for row in means[:6]] == [*ARMS.values(), *(TITLES[name] for name in ("means", "logistic", "trees"))]
    assert [row[0] for row in means] == ["150"] * 6 + ["500"] * 6 + ["1,500"] * 6
    assert [row[1] for row in means if row[-1] == "strongest baseline"] == ["logistic regression on counts"] * 3
    found = {
        (one["num_examples"], one["arm"], one["against"], one["metric"]): one for one in table["figures"]["differences"]
    }
    best = found[150, "fine-tuned", "scratch", "auc"]
    # Draws are paired: what every arm shares drops out.
    assert best["difference"] == pytest.approx(0.05) and best["half_width"] == pytest.approx(0.0, abs=1e-4)
    assert best["verdict"] == "agree"
    assert found[150, "fine-tuned", "scratch", "log_loss"]["verdict"] == "disagree", "lower would be better"
    assert found[150, "frozen", "scratch", "auc"]["verdict"] == "within noise", "no direction was published"
    for size in (150, 500, 1_500):
        assert found[size, "fine-tuned", "logistic", "auc"]["verdict"] == "better"
        assert found[size, "scratch", "logistic", "auc"]["verdict"] == "worse"
        assert found[size, "trees", "logistic", "auc"]["difference"] == pytest.approx(-0.01)
    assert any("tries 12 settings: 6 rates with 2 regularisations" in note for note in table["notes"])
    assert any("The aim is at most 0.0030" in note for note in table["notes"])
    first, second = (part for title, part in by_title.items() if title.startswith("Differences"))
    assert first["title"].startswith("Differences of auc, the metric that decides")
    assert {row[1] for row in first["rows"]} == {"auc"} and "half-width" in first["header"]
    assert {row[1] for row in second["rows"]} == set(METRICS) - {"auc"}
    [chart] = table["charts"]
    assert [line["name"] for line in chart["lines"]] == [*ARMS.values(), "strongest baseline"]
    assert all(len(line["x"]) == 3 for line in chart["lines"])
    assert set(charts({"table": table})) == {"auc"}
    assert protocol({"table": table}) == table["protocol"], "not that of a ranking"
    assert json.loads(json.dumps(table)) == table


def test_baselines_alone(made_up_ratings: Callable[[Path, Sequence[str]], None], tmp_path: Path) -> None:
    """On Deskdrop they answer both tasks: with repeats, where one bit is a baseline too, and without."""
    work = Work.open(tmp_path / "work")
    made_up_ratings(work.datasets / "deskdrop-file", ("view", "like", "bookmark"))
    context = StudyContext(work, find_bench("deskdrop"), Options(study="transfer-baselines", seeds=2))
    plan = find_study("transfer-baselines")(context)
    assert {cell.stage for cell in plan.cells} == {"transfer-baselines"} and len(plan.cells) == 2 * (2 + 2 + 1)
    for cell in plan.cells:
        run_cell(work, cell, Machine(device="cpu", num_threads=1))
    table = plan.table(work.find)
    new, every = ([row[1] for row in part["rows"]] for part in table["sections"] if "Test, mean" in part["title"])
    assert "previous event" not in new and every.count("previous event") == 3
    assert {one["seed"] for one in table["figures"]["rows"] if one["num_examples"] > 100} == {0}, "all examples: once"
    assert "only items that are new to the user" in table["protocol"] and "are yes" in table["protocol"]
    assert json.loads(json.dumps(table)) == table


def test_the_strongest_baseline_has_the_highest_auc(work: Work) -> None:
    plan = plan_of(work, study="transfer-baselines")
    for cell in plan.cells:
        level = 0.9 if cell.protocol["share"] == 1.0 else 0.5
        save_baselines(work, cell, {"means": 0.6, "trees": level})
    rows = plan.table(work.find)["sections"][0]["rows"]
    assert [row[1] for row in rows if row[-1]] == [TITLES[name] for name in ("means", "means", "trees")]
    assert strongest_baseline({}, "all") is None


def test_unfinished_pairs_are_not_compared(work: Work) -> None:
    plan = plan_of(work)
    cell = next(cell for cell in plan.cells if cell.protocol.get("arm") == "frozen")
    save(work, cell, 0.7)
    result = work.find(cell)
    assert result is not None
    assert compare_arms({("tenth", "frozen"): [result]}, {}) == []
    assert measure([result], [result], "auc").difference == 0.0
