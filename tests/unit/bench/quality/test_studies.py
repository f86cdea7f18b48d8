"""Studies: which cells they ask for, and what their tables say of results that are made up here."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality.cell import metrics_of
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.data import BENCHES, find_bench
from tackboard.bench.quality.studies import (
    PUBLISHED,
    agrees,
    compare,
    compare_to_strongest,
    mean_metrics,
    per_user,
    reproduce,
    validate,
)
from tackboard.bench.quality.study_plan import Options, StudyContext, StudyPlan
from tackboard.core.errors import DataError, UsageError

NUM_USERS = 200
GAPS_S = np.array([0, 5, 600, 7_200, 100_000])
"""A fifth of the users is in each range of gaps."""


@pytest.fixture
def context(fake_ml_1m: Path, tmp_path: Path) -> StudyContext:
    return StudyContext(Work.open(tmp_path / "work"), find_bench("ml-1m"), Options(), fake_ml_1m)


def finish(context: StudyContext, cell: Cell, share: float, *, users: str = "same", **values: Any) -> Result:
    """A result in which that share of users has the held-out item first, and the others nowhere."""
    ranks = np.where(np.arange(NUM_USERS) < share * NUM_USERS, 0, 3_000)
    curve = [{"step": step} | metrics_of(ranks) for step in (2, 4)]
    fitted = {"steps": 4, "chosen_steps": 4, "best_step": 2, "best_metrics": metrics_of(ranks), "curve": curve,
              "parameters": 10, "seconds": 1.5, "tokens_per_s": 100, "evaluation_seconds": 0.5, "device": "cpu",
              "peak_device_bytes": None}  # fmt: skip
    common = {"metrics": metrics_of(ranks), "targets_sha256": users, "peak_rss_bytes": 2**20}
    places = np.arange(NUM_USERS)
    arrays = {"ranks": ranks, "returns": places % 4 == 0, "gaps": GAPS_S[places % len(GAPS_S)]}
    return context.work.save(cell, common | (fitted if cell.config else {}) | values, arrays)


def rows_of(table: dict[str, Any], title: str) -> list[list[str]]:
    parts = table["sections"]
    [rows] = [part["rows"] for part in parts if part["title"] == title] or [
        part["rows"] for part in parts if part["title"].startswith(title)
    ]
    assert all(len(row) == len(part["header"]) for part in table["sections"] for row in part["rows"])
    return list(rows)


def test_compare_asks_for_one_validation_and_three_tests_of_each_method(context: StudyContext) -> None:
    plan = compare(context)
    fitted = [cell for cell in plan.cells if cell.config]
    assert {cell.stage for cell in fitted} == {"test"}
    assert {cell.seed for cell in fitted} == {0, 1, 2}
    assert all(cell.after is not None and (cell.after.stage, cell.after.seed) == ("validate", 0) for cell in fitted)
    assert all(cell.after and cell.after.method == cell.method for cell in fitted)
    assert [cell.method for cell in plan.cells if not cell.config] == ["popularity", "item-to-item"] * 3
    assert {cell.ties for cell in fitted} == {"file", "reverse", "random"}
    names = {cell.method for cell in fitted}
    assert {"pinfm-history", "pinfm-published-request", "sasrec-wide-request", "hstu-wide-history"} <= names
    assert {"sasrec-fair-history", "hstu-fair-history", "sasrec-fair-request", "hstu-fair-request"} <= names
    assert {"hstu-large", "hstu-large-history", "hstu-large-request"} <= names, "as published too"
    context.options = Options(quick=True)
    assert len(compare(context).cells) == 4
    assert {cell.prepared for cell in compare(context).cells} == {"ml-1m-file-every2"}


def test_compare_table(context: StudyContext) -> None:
    methods = ("popularity", "sasrec-history", "sasrec-request", "pinfm-history")
    context.options = Options(methods=methods, seeds=2, ties=("random",))
    plan = compare(context)
    empty = plan.table(context.work.find)
    assert not rows_of(empty, "Test, each seed") and empty["charts"] == [], "a table of nothing is no error"
    shares = {"popularity": 0.1, "sasrec-history": 0.3, "sasrec-request": 0.9, "pinfm-history": 0.6}
    for cell in plan.cells:
        finish(context, cell, shares[cell.method] + 0.01 * cell.seed)
        if cell.after is not None:
            finish(context, cell.after, 0.5)
    table = plan.table(context.work.find)
    singles = rows_of(table, "Test, each seed")
    assert [row[5:7] for row in singles] == [["", "0.1000"], ["0", "0.3000"], ["1", "0.3100"], ["0", "0.9000"],
                                             ["1", "0.9100"], ["0", "0.6000"], ["1", "0.6100"]]  # fmt: skip
    means = rows_of(table, "Test, mean over seeds")
    assert [row[6] for row in means] == ["0.1000", "0.3050", "0.9050", "0.6050"]
    assert [row[3] for row in means] == ["", "0: not tuned", "0: not tuned", "42: both inputs"]
    beside = rows_of(table, "Under random ties, beside published figures")
    assert beside[:4] == means
    assert [row[6] for row in beside[4:]] == ["0.2853", "0.3097", "0.3294", "0.3152", "0.3003"]
    hit, gain = rows_of(table, "Difference")
    assert hit[2] == "42: both inputs" and hit[4:9] == ["all", "hr@10", "SASRec of width 64", "0: not tuned", "+0.3000"]
    assert hit[-2:] == ["0.0071", "better"] and gain[5] == "ndcg@10"
    figures = table["figures"]
    assert {one["against"] for one in figures["comparisons"]} == {"sasrec-history"}, "the other reads more"
    assert figures["comparisons"][0]["low"] > 0.2 and figures["comparisons"][0]["verdict"] == "better"
    assert len(figures["rows"]) == 7 and len(figures["validation"]) == 3
    assert figures["published"]["hstu-large"]["hr@10"] == 0.3294
    dots, curves = table["charts"]
    assert [row["name"] for row in dots["rows"]] == ["popularity", "sasrec-history", "sasrec-request", "pinfm-history"]
    assert [line["x"] for line in curves["lines"]] == [[2, 4]] * 3


def test_published_figures_stand_beside_random_ties_alone(context: StudyContext) -> None:
    for rules, is_shown in ((("file", "reverse"), False), (("file", "random"), True)):
        context.options = Options(methods=("popularity",), ties=rules)
        plan = compare(context)
        for cell in plan.cells:
            finish(context, cell, 0.1 if cell.ties == "random" else 0.2)
        table = plan.table(context.work.find)
        shown = [part for part in table["sections"] if any("published" in row[0] for row in part["rows"])]
        assert [{row[4] for row in part["rows"]} for part in shown] == ([{"random", ""}] if is_shown else [])
        [dots] = table["charts"]
        assert bool(dots["marks"]) is is_shown and bool(table["figures"]["published"]) is is_shown
        assert [row["values"] for row in dots["rows"]] == ([[0.1]] if is_shown else [[0.2, 0.2]])


def test_methods_that_know_the_request_lead_without_same_second_targets(context: StudyContext) -> None:
    context.options = Options(methods=("sasrec-request", "pinfm-history", "pinfm-request"), seeds=1, ties=("file",))
    plan = compare(context)
    for cell in plan.cells:
        result = finish(context, cell, 0.5)
        if cell.method == "pinfm-request":  # All hits of this method are in the same second.
            np.save(result.path / "ranks.npy", np.where(result.array("gaps") == 0, 0, 3_000))
    table = plan.table(context.work.find)
    titles = [part["title"] for part in table["sections"]]
    assert titles[1].startswith("Test, mean over seeds, of the 160 of 200 users whose test event is not in the second")
    leading = rows_of(table, titles[1])
    assert [row[6] for row in leading] == ["0.5000", "0.5000", "0.0000"]
    rows = rows_of(table, "Difference")
    assert [(row[1].endswith("request's time"), row[4]) for row in rows] == [
        (True, "not in the second of the event before"),
        (True, "not in the second of the event before"),
        (True, "all"),
        (True, "all"),
    ], "no rival reads as little as pinfm-history here"
    assert rows[0][8] == "-0.5000"
    by_gap = rows_of(table, "By the time")
    assert by_gap[0][4:] == ["40"] * 5 and [row[4] for row in by_gap[-2:]] == ["1.0000", "1.0000"]
    context.options = Options(methods=("pinfm-history",), seeds=1, ties=("file",))
    titles = [part["title"] for part in compare(context).table(context.work.find)["sections"]]
    assert not any("is not in the second" in title for title in titles)


@pytest.mark.parametrize(
    ("loss", "said"), [("full", "inner products, all items"), ("sampled", "cosines, 128 drawn items")]
)
def test_every_row_says_what_its_softmax_is_over(context: StudyContext, loss: str, said: str) -> None:
    context.options = Options(methods=("sasrec-history",), seeds=1, overrides=(f"model.loss.kind={loss}",))
    cells = [*compare(context).cells, *validate(context).cells]
    for cell in cells:
        finish(context, cell, 0.3)
    parts = [part for study in (compare, validate) for part in study(context).table(context.work.find)["sections"]]
    ours = [
        row[part["header"].index("softmax over")]
        for part in parts
        if "softmax over" in part["header"]
        for row in part["rows"]
        if not row[0].startswith("published")
    ]
    # Rows of each seed and of the mean, under all tie rules, and the row of the validation.
    assert len(ours) >= 3
    assert set(ours) == {said}


def test_the_strongest_rival_is_the_strongest_of_all_that_read_no_more(context: StudyContext) -> None:
    """HSTU-large as published reads the request's time, so it counts against PinFM with that time and not without."""
    context.options = Options(
        methods=("sasrec-wide-history", "sasrec-fair-history", "hstu-fair-request", "hstu-large", "pinfm-history",
                 "pinfm-published-history", "pinfm-request"),
        seeds=1,
    )  # fmt: skip
    shares = dict(zip(context.options.methods, (0.2, 0.3, 0.35, 0.4, 0.5, 0.45, 0.6), strict=True))
    plan = compare(context)
    for cell in plan.cells:
        finish(context, cell, shares[cell.method])
    found = {one["method"]: one for one in plan.table(context.work.find)["figures"]["comparisons"]}
    assert {name: one["against"] for name, one in found.items()} == {
        "pinfm-history": "sasrec-fair-history",
        "pinfm-published-history": "sasrec-fair-history",
        "pinfm-request": "hstu-large",
    }
    assert found["pinfm-request"]["difference"] == pytest.approx(0.2)


def test_what_returns_is_shown_where_the_history_stays(context: StudyContext) -> None:
    context.options = Options(methods=("popularity",))
    plan = compare(context)
    finish(context, plan.cells[0], 0.5)
    titles = [part["title"] for part in plan.table(context.work.find)["sections"]]
    assert not any("already" in title for title in titles)
    other = StudyContext(context.work, BENCHES["deskdrop"], context.options)
    table = StudyPlan(plan.cells, lambda find: _table_of(other, plan, find)).table(context.work.find)
    [row] = rows_of(table, "hr@10 where the item is in the history already (25.0% of users)")
    assert row[3:] == ["0.5000", "0.5000"]


def _table_of(context: StudyContext, plan: StudyPlan, find: Any) -> dict[str, Any]:
    from tackboard.bench.quality.studies import _compare_table

    return _compare_table(context, plan.cells, find)


def test_users_must_be_the_same_to_be_paired(context: StudyContext) -> None:
    context.options = Options(methods=("sasrec-history", "pinfm-history"), seeds=1)
    cells = compare(context).cells
    groups = {
        ("file", cells[0].method): [finish(context, cells[0], 0.2)],
        ("file", cells[1].method): [finish(context, cells[1], 0.3, users="others")],
    }
    with pytest.raises(DataError, match="different events"):
        compare_to_strongest(groups)


def test_chance_of_seeds_counts_too(context: StudyContext) -> None:
    context.options = Options(methods=("popularity", "pinfm-history"), seeds=2, ties=("file",))
    first, *ours = compare(context).cells
    baseline = finish(context, first, 0.3)
    # Far from the baseline by users; between the seeds lies as much.
    fits = [finish(context, cell, share) for cell, share in zip(ours, (0.35, 0.65), strict=True)]
    [hit, _] = compare_to_strongest({("file", "popularity"): [baseline], ("file", "pinfm-history"): fits})
    assert hit["low"] > 0.1 and hit["verdict"] == "within noise"
    assert hit["seed_error"] == pytest.approx(0.15), "a count has no seeds"
    [hit, _] = compare_to_strongest({("file", "popularity"): [baseline], ("file", "pinfm-history"): fits[1:]})
    assert hit["verdict"] == "better, one seed" and hit["seed_error"] is None


def test_a_user_counts_by_the_mean_over_seeds(context: StudyContext) -> None:
    context.options = Options(methods=("sasrec-history",), seeds=2, ties=("file",))
    results = [finish(context, cell, share) for cell, share in zip(compare(context).cells, (0.5, 1.0), strict=True)]
    values = per_user(results, "hr@10")
    assert values[:100].tolist() == [1.0] * 100 and values[100:].tolist() == [0.5] * 100
    assert mean_metrics(results)["ndcg@10"] == pytest.approx(per_user(results, "ndcg@10").mean()) == 0.75


def test_reproduce_compares_random_ties_with_what_was_published(context: StudyContext) -> None:
    plan = reproduce(context)
    assert len(plan.cells) == 9 and {cell.ties for cell in plan.cells} == {"file", "reverse", "random"}
    assert {cell.stage for cell in plan.cells} == {"published"}
    assert {cell.protocol["filter_newest"] for cell in plan.cells} == {12}
    shares = {"file": 0.9, "reverse": 0.9, "random": 0.2775}
    for cell in plan.cells[:3]:
        finish(context, cell, shares[cell.ties])
    table = plan.table(context.work.find)
    assert len(rows_of(table, "Tested during training")) == 3
    hit, gain = rows_of(table, "Published figures against ours under random ties")
    assert hit == ["SASRec, sampled softmax", "hr@10", "0.2853", "0.2800", "0.2800", "agree"]
    # Every hit is at the first place here, so the gain is as high as the hit rate: far from what was published.
    assert gain[1] == "ndcg@10" and gain[-1] == "do NOT agree"
    assert [one["agrees"] for one in table["figures"]["agreement"]] == [True, False]


@pytest.mark.parametrize(("published", "verdict"), [(0.259, False), (0.26, True), (0.29, True), (0.291, False)])
def test_agreement_is_within_the_tolerance_of_the_mean(context: StudyContext, published: float, verdict: bool) -> None:
    cells = reproduce(context).cells[:2]
    results = [finish(context, cell, share) for cell, share in zip(cells, (0.25, 0.30), strict=True)]
    assert agrees(results, "hr@10", published)["agrees"] is verdict


def test_reproduce_needs_published_figures(context: StudyContext) -> None:
    with pytest.raises(UsageError, match="datasets with published figures: ml-1m"):
        reproduce(StudyContext(context.work, BENCHES["deskdrop"], Options()))
    assert set(PUBLISHED) <= set(BENCHES)


def test_validate_shows_the_validation_alone(context: StudyContext) -> None:
    context.options = Options(methods=("pinfm-history", "hstu", "hstu"), seeds=2)
    plan = validate(context)
    assert len(plan.cells) == 4, "a name that is given twice is run once"
    assert plan.table(context.work.find)["notes"] == [], "nothing is said of nothing"
    assert {(cell.method, cell.seed, cell.stage) for cell in plan.cells} == {
        (method, seed, "validate") for method in ("pinfm-history", "hstu") for seed in (0, 1)
    }
    finish(context, plan.cells[0], 0.5)
    table = plan.table(context.work.find)
    [row] = rows_of(table, "Validation")
    assert row[0].startswith("PinFM, ours: HSTU layers, residual maps")
    assert row[1:2] + row[3:8] == ["items, actions, times", "42: both inputs", "file", "0", "0.5000", "0.5000"]


def test_only_what_the_model_reads_is_taken_out_of_a_published_ranking(context: StudyContext) -> None:
    bench = dataclasses.replace(context.bench, max_length=200)
    for quick, length in ((False, 200), (True, 50)):
        options = Options(quick=quick, methods=("hstu",))
        plan = reproduce(dataclasses.replace(context, bench=bench, options=options, is_trial=True))
        assert {cell.protocol["filter_newest"] for cell in plan.cells} == {length}
        assert {cell.run_config().model.max_history for cell in plan.cells} == {length}
