"""The study of tries: the same number for each method, drawn once, resumed by cells, and divergence is a try."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality import tuning
from tackboard.bench.quality.cell import Machine, metrics_of, run_cell
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.kept_ranks import write_kept
from tackboard.bench.quality.methods import METHODS
from tackboard.bench.quality.report import report
from tackboard.bench.quality.run import finished, kept_options, measure, recompute
from tackboard.bench.quality.study_plan import Options, StudyContext
from tackboard.bench.quality.tuning import DROPOUT, GRIDS, RATE, STEPS, TABLE_RATE, draw, edges_of, grid_of, tune
from tackboard.bench.report import table_lines
from tackboard.core.errors import DivergedError, UsageError

SMALL = ("model.width=8", "model.backbone.num_layers=1", "pinfm-history:model.tables.dim=2", "training.steps=4",
         "training.checkpoint_every=2")  # fmt: skip


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


@pytest.fixture
def context(fake_ml_1m: Path, tmp_path: Path) -> StudyContext:
    return StudyContext(Work.open(tmp_path / "work"), find_bench("ml-1m"), Options(study="tune"), fake_ml_1m)


def finish(context: StudyContext, cell: Cell, share: float | None) -> Result:
    """A result in which that share of 100 users has the held-out item first; None: it diverged."""
    ranks = np.where(np.arange(100) < (share or 0) * 100, 0, 3_000)
    values = {"metrics": metrics_of(ranks), "chosen_steps": 4, "seconds": 1.5, "num_items": 30}
    if share is None:  # A fit that diverged has no ranks.
        return context.work.save(cell, {"diverged": "loss is nan"}, {})
    return context.work.save(cell, values, {"ranks": ranks})


def rows_of(table: dict[str, Any], title: str) -> list[list[str]]:
    assert all(len(row) == len(part["header"]) for part in table["sections"] for row in part["rows"])
    return next(list(part["rows"]) for part in table["sections"] if part["title"] == title)


def test_each_method_has_the_same_number_of_tries(context: StudyContext) -> None:
    cells = tune(context).cells
    names = [cell.method for cell in cells]
    assert {name: names.count(name) for name in names} == dict.fromkeys(tuning.DEFAULT_METHODS, 12)
    assert names[:6] == list(tuning.DEFAULT_METHODS) * 2, "methods take turns"
    assert {(cell.seed, cell.stage, cell.prepared) for cell in cells} == {(0, "tune", "ml-1m-file")}
    assert len({cell.name for cell in cells}) == len({cell.label for cell in cells}) == 36
    assert cells[3].label == "ml-1m-file_pinfm-history_seed0_tune2"
    context.options = Options(study="tune", tries=14)
    more = tune(context).cells
    assert len(more) == 42 and {cell.name for cell in cells} < {cell.name for cell in more}, "more tries keep the first"
    context.options = Options(study="tune", quick=True)
    assert len(tune(context).cells) == 6


@pytest.mark.parametrize("name", ["ml-1m", "kakao-brunch", "deskdrop"])
def test_a_try_is_a_point_of_the_declared_grid(name: str) -> None:
    context = StudyContext(Work(Path("absent")), find_bench(name), Options(study="tune"), is_trial=True)
    place = context.places(["file"])["file"]
    for method in ("sasrec-fair-history", "hstu-fair-history", "pinfm-history"):
        grid = grid_of(METHODS[method], place)
        assert (TABLE_RATE in grid) == (method == "pinfm-history"), "a plain table has the rate of all the rest"
        base = METHODS[method].build(place)  # type: ignore[misc]
        assert base.training.steps in grid[STEPS] and base.model.dropout in grid[DROPOUT], "the recipe is in reach"
        points = draw(grid, 12)
        assert len({tuple(point.items()) for point in points}) == 12
        assert all(value in grid[key] for point in points for key, value in point.items())
    tried = [cell for cell in tune(context).cells if cell.method == "hstu-fair-history"]
    points = draw(grid_of(METHODS["hstu-fair-history"], place), 12)
    for cell, point in zip(tried, points, strict=True):
        config = cell.run_config()
        assert (config.optimizer.dense_learning_rate, config.training.steps) == (point[RATE], point[STEPS])
        assert config.training.checkpoint_every == -(-config.training.steps // 12)


def test_too_many_tries_and_methods_that_have_nothing_to_tune(context: StudyContext) -> None:
    def refused(**options: Any) -> str:
        context.options = Options(study="tune", **options)
        with pytest.raises(UsageError) as error:
            tune(context)
        return str(error.value)

    assert "at most 225, the points of the grid" in refused(methods=("sasrec-fair-history",), tries=226)
    assert "hstu-large, which has the published settings" in refused(methods=("hstu-large",))
    assert "popularity fits nothing" in refused(methods=("popularity",))
    assert "has one seed, not 3" in refused(seeds=3)
    assert "takes one tie rule" in refused(ties=("file", "random"))
    with pytest.raises(UsageError, match="--tries 3 does nothing in --study compare"):
        measure("ml-1m", Options(tries=3), work=context.work.root, data=context.data, device="cpu")


def test_the_table_has_every_try_and_the_choice(context: StudyContext) -> None:
    context.options = Options(study="tune", methods=("sasrec-fair-history", "pinfm-history"), tries=3)
    plan = tune(context)
    assert plan.table(context.work.find)["notes"] == []
    of_rival = [cell for cell in plan.cells if cell.method == "sasrec-fair-history"]
    for cell, share in zip(of_rival, (0.3, None, 0.5), strict=True):
        finish(context, cell, share)
    finish(context, next(cell for cell in plan.cells if cell.method == "pinfm-history"), 0.4)
    table = plan.table(context.work.find)
    tries = rows_of(table, "Every try")
    assert [row[3] for row in tries] == ["1", "2", "3", "1"]
    assert [row[-1] for row in tries] == ["", "diverged: loss is nan", "best", "best"]
    assert [row[9] for row in tries] == ["0.3000", "", "0.5000", "0.4000"]
    assert [row[5] == "" for row in tries] == [True, True, True, False], "only PinFM has a table rate"
    rival, ours = rows_of(table, "Choice")
    assert rival[2:6] == ["3", "1", "0.5000", "0.5000"] and rival[6].startswith("rate ")
    assert ours[2:4] == ["1 of 3", "0"] and ours[6].startswith("not yet; best so far")
    [entry] = table["figures"]["entries"]
    assert entry.startswith('("sasrec-fair", "ml-1m"): Tuned(tries=3, note="1 diverged", settings=("optimizer.dense_')
    assert f"For bench/quality/tuned.py: {entry}" in table["notes"]
    assert [one["diverged"] for one in table["figures"]["rows"]] == [None, "loss is nan", None, None]
    kept = context.work.root / "tune_ranks.npz"
    write_kept(kept, kept_options(context, plan), {"dataset": "ml-1m"}, finished(context, plan))
    assert recompute(kept)["table"] == table, "the table comes out of the kept ranks"
    for cell in plan.cells:
        finish(context, cell, 0.2)
    [_, entry] = plan.table(context.work.find)["figures"]["entries"]
    assert 'Tuned(tries=45, note="42 before the study, 0 diverged"' in entry, "tries from the log are not forgotten"


def test_a_choice_at_the_edge_is_told() -> None:
    grid = {RATE: (1e-3, 2e-3, 4e-3), DROPOUT: (0.0, 0.1)}
    assert edges_of(grid, {RATE: 2e-3, DROPOUT: 0.0}) == [], "0 is the end of all dropouts"
    assert edges_of(grid, {RATE: 4e-3, DROPOUT: 0.1}) == [RATE, DROPOUT]
    for values in GRIDS.values():
        assert all(list(choices) == sorted(set(choices)) for choices in values.values())


def test_a_fit_that_diverges_is_a_finished_try(context: StudyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> Any:
        raise DivergedError("6 of the last 200 steps were bad: loss is nan", fix="lower the rate")

    monkeypatch.setattr(tuning, "run_validation", diverge)
    cell = tune(context).cells[0]
    result = run_cell(context.work, cell, Machine(device="cpu", num_threads=1))
    assert result.values["diverged"] == "6 of the last 200 steps were bad: loss is nan"
    assert context.work.find(cell) is not None, "it is not tried again"


def test_from_files_to_a_choice(fake_ml_1m: Path, tmp_path: Path) -> None:
    """A rate that no fit survives diverges for real; the other fits end."""
    options = Options(
        study="tune", quick=True, tries=2, methods=("sasrec-fair-history", "pinfm-history"),
        overrides=(*SMALL, "pinfm-history:optimizer.dense_learning_rate=1e30", "pinfm-history:training.steps=40",
                   "guard.max_bad_steps=0"),
    )  # fmt: skip
    result = measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m, jobs=0, device="cpu")
    assert (result["num_finished"], result["failures"]) == (4, [])
    rival, ours = rows_of(result["table"], "Choice")
    assert rival[2:4] == ["2", "0"] and ours[2:4] == ["2", "2"] and ours[6] == "none: all diverged"
    lines = table_lines(report(result))
    assert lines[1].startswith("Validation: each try ranks the event before the last, for all users, in the whole")
    assert any("diverged: " in line for line in lines) and any("cosines, all items" in line for line in lines)
    again = measure("ml-1m", options, work=tmp_path / "work", jobs=0, device="cpu")
    assert again["table"] == result["table"], "and nothing runs twice"
