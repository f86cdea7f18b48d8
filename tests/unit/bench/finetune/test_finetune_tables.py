"""The tables of the bench: HIT@3 by slice, paired differences, verdicts beside published directions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.finetune.finetune_study import FinetuneOptions, FinetunePlan, plan
from tackboard.bench.finetune.finetune_tables import OF_COLD, OF_WAYS, tables_of
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.report import charts

NUM = 600
USERS = np.repeat(np.arange(NUM // 3), 3)
AGES = np.arange(NUM) % 3
SHARED = np.random.default_rng(1).random(NUM)
"""How hard each request is; the same for every ranker."""


def save(work: Work, cell: Cell, level: float, young: float | None = None) -> None:
    """A finished ranker that hits a request if the request is easier than `level` (of young items: `young`)."""
    levels = np.where((AGES == 0) & (young is not None), young or 0.0, level)
    noise = np.random.default_rng(cell.seed).normal(size=NUM) * 0.01
    places = np.where(SHARED + noise < levels, 0, 7)
    saved = np.where(np.arange(NUM) % 4 == 0, places, -1)
    arrays = {"users": USERS, "ages": AGES, "places_next": places, "places_save": saved}
    metrics = {f"next/{name}": 0.5 for name in ("auc", "ne", "calibration")}
    counts = {"num_train": round(900 * cell.protocol["share"]), "num_validation": 90, "num_test": NUM}
    values = {"metrics": metrics, "validation_loss": 0.1, "seconds": 2.0, "steps": 3, "of_steps": 4, **counts}
    work.save(cell, values, arrays)


@pytest.fixture
def study(tmp_path: Path) -> tuple[Work, FinetunePlan]:
    return Work.open(tmp_path / "work"), plan(FinetuneOptions(seeds=2))


def test_nothing_is_finished(study: tuple[Work, FinetunePlan]) -> None:
    work, planned = study
    table = tables_of(planned, work.find)
    assert all(not part["rows"] for part in table["sections"]) and not table["charts"] and not table["notes"]


def test_the_tables(study: tuple[Work, FinetunePlan]) -> None:
    work, planned = study
    levels = {"none": 0.5, "frozen": 0.5, "late-last": 0.6, "early": 0.7, "content": 0.4}
    for (name, _, _), cell in planned.rankers.items():
        save(work, cell, levels.get(name, 0.85), {"early": 0.2, "dropout": 0.9}.get(name))
    table = tables_of(planned, work.find)
    assert json.loads(json.dumps(table)) == table
    found = {
        (one["share"], one["ranker"], one["against"], one["label"], one["items"]): one
        for one in table["figures"]["differences"]
    }
    assert found["all", "late-last", "none", "next", "all"]["verdict"] == "agree"
    assert found["all", "late-last", "none", "next", "all"]["difference"] == pytest.approx(0.1, abs=0.03)
    assert found["all", "content", "none", "next", "all"]["verdict"] == "disagree"
    assert found["all", "frozen", "none", "next", "all"]["difference"] == 0.0
    assert found["all", "frozen", "none", "next", "all"]["verdict"] == "within noise"
    assert found["all", "late-last", "none", "save", "all"]["label"] == "save"
    assert found["all", "early", "none", "next", "under 7 days"]["verdict"] == "agree", "worse, as published"
    assert found["all", "early", "none", "next", "under 7 days"]["published"] == "−23.98%"
    assert found["all", "dropout", "none", "next", "under 7 days"]["verdict"] == "agree"
    assert found["all", "random-ids", "none", "next", "under 7 days"]["verdict"] == "disagree", "better, not worse"
    assert found["third", "late-last", "scratch", "next", "all"]["verdict"] == "worse"
    assert {key[0] for key in found if key[1] == "trees" or key[2] == "trees"} == {"tenth", "third", "all"}
    titles = [part["title"] for part in table["sections"] if part["rows"]]
    assert titles[0].startswith("Ways to use PinFM") and titles[-1] == "Each seed"
    ages = next(part for part in table["sections"] if part["title"].startswith("Cold start: HIT@3"))
    assert ages["rows"][-1] == ["test requests", "", "200", "200", "200", "400", "600"]
    figures = {row[0]: row[2:] for row in ages["rows"]}
    assert float(figures["early fusion"][0]) == pytest.approx(0.2, abs=0.07) != float(figures["early fusion"][1])
    assert any(note.startswith("For 0 of ") for note in table["notes"]), "step 3 of 4 was the best"
    assert {chart["name"] for chart in table["charts"]} == {"hit3", "requests"}
    assert set(charts({"table": table})) == {"hit3", "requests"}


def test_a_seed_counts_only_if_both_rankers_finished_it(study: tuple[Work, FinetunePlan]) -> None:
    work, planned = study
    for name, seed in (("none", 0), ("none", 1), ("late-last", 1)):
        save(work, planned.rankers[name, "all", seed], {"none": 0.5, "late-last": 0.6}[name])
    [row] = [one for one in tables_of(planned, work.find)["figures"]["differences"] if one["label"] == "next"]
    assert row["seed_error"] is None and row["verdict"] == "agree, one seed"


def test_every_published_direction_belongs_to_a_ranker() -> None:
    names = {name for name, _, _ in plan(FinetuneOptions()).rankers}
    pairs: list[Any] = list(OF_WAYS)
    assert {name for pair in pairs for name in pair} | set(OF_COLD) <= names
