"""The study of ablations: every question has its recipes, the base runs once, positives are judged alike."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality.ablations import HELD_OUT, QUESTIONS, JudgedFit, ablations
from tackboard.bench.quality.cell import Machine, metrics_of, run_cell
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.kept_ranks import write_kept
from tackboard.bench.quality.run import finished, kept_options, measure, recompute
from tackboard.bench.quality.study_plan import Options, StudyContext, StudyPlan
from tackboard.core.errors import UsageError
from tackboard.data.source import open_sequences
from tackboard.events.dataset import open_dataset
from tackboard.recipes.ablations import SAVES
from tackboard.recipes.registry import RECIPES

ACTIONS = ("view", "view", "view", "like", "bookmark", "comment_created", "follow")
CPU = Machine(device="cpu", num_threads=1)
TINY = ("model.width=8", "model.tables.dim=1", "training.steps=4", "training.checkpoint_every=4")


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


@pytest.fixture
def work(made_up_ratings: Callable[..., None], tmp_path: Path) -> Work:
    work = Work.open(tmp_path / "work")
    made_up_ratings(work.datasets / "ml-1m-file")
    made_up_ratings(work.datasets / "ml-1m-file-every6")
    made_up_ratings(work.datasets / "deskdrop-file", ACTIONS)
    return work


def plan_of(work: Work, dataset: str, **options: Any) -> StudyPlan:
    return ablations(StudyContext(work, find_bench(dataset), Options(study="ablations", **options)))


def test_every_variant_is_a_recipe_and_every_recipe_is_asked() -> None:
    names = {f"ablation-{question.name}-{variant.name}" for question in QUESTIONS for variant in question.variants}
    assert names == {name for name in RECIPES if name.startswith("ablation-")}
    for question in QUESTIONS:
        known = [variant.name for variant in question.variants]
        for place, variant in enumerate(question.variants):
            assert bool(variant.against) == (place > 0)
            assert not variant.against or variant.against in known[:place]
            assert bool(variant.words) == bool(variant.against)


def test_the_base_answers_five_questions_and_runs_once(work: Work) -> None:
    plan = plan_of(work, "ml-1m")
    count = sum(len(question.variants) for question in QUESTIONS if question.dataset == "ml-1m")
    assert len(plan.cells) == 3 * count
    assert len({cell.name for cell in plan.cells}) == 3 * (count - 4)
    ladder = [cell for cell in plan.cells if cell.method.startswith("ablation-ladder")]
    assert len(ladder) == 3 * 7 and all("ahead" not in cell.protocol for cell in ladder)
    assert {cell.stage for cell in plan.cells} == {"validate"}


def test_only_the_questions_that_were_asked(work: Work) -> None:
    plan = plan_of(work, "ml-1m", questions=("ladder", "own"), seeds=1)
    asked = [question for question in QUESTIONS if question.name in ("own", "ladder")]
    assert len(plan.cells) == sum(len(question.variants) for question in asked)
    assert {cell.name for cell in plan.cells} <= {cell.name for cell in plan_of(work, "ml-1m").cells}
    empty = plan.table(work.find)["sections"]
    assert [part["title"] for part in empty if "differences" not in part["title"]] == [one.title for one in asked]
    with pytest.raises(UsageError, match="--questions laddr is no question") as caught:
        plan_of(work, "ml-1m", questions=("laddr",))
    assert "ladder" in str(caught.value) and "positives" not in str(caught.value)
    with pytest.raises(UsageError, match="--questions own does nothing in --study compare"):
        measure("ml-1m", Options(questions=("own",)), work=work.root, device="cpu")


def test_a_quick_one_is_short(work: Work) -> None:
    for cell in plan_of(work, "ml-1m", quick=True).cells:
        config = cell.run_config()
        assert 1 < config.training.steps <= 45 and config.data.tokens_per_step <= 2_048
        assert config.training.checkpoint_every == config.training.steps


def test_other_datasets_are_refused(work: Work) -> None:
    other = dataclasses.replace(find_bench("deskdrop"), name="other")
    with pytest.raises(UsageError, match="allowed: ml-1m, deskdrop, kakao-brunch"):
        ablations(StudyContext(work, other, Options(study="ablations")))


def test_what_it_would_not_do_is_refused(work: Work) -> None:
    with pytest.raises(UsageError, match="takes no --methods, but got sasrec"):
        plan_of(work, "ml-1m", methods=("sasrec",))
    with pytest.raises(UsageError, match="takes one tie rule, not file,random"):
        plan_of(work, "ml-1m", ties=("file", "random"))
    with pytest.raises(UsageError, match="pinfm-history, which is not run"):
        plan_of(work, "ml-1m", overrides=("pinfm-history:model.width=8",))
    one = [cell for cell in plan_of(work, "ml-1m", overrides=("ablation-losses-all:model.width=48",)).cells
           if cell.run_config().model.width == 48]  # fmt: skip
    assert {cell.method for cell in one} == {"ablation-losses-all"}
    context = StudyContext(
        Work(work.root / "absent"), find_bench("deskdrop"), Options(study="ablations"), is_trial=True
    )
    assert ablations(context).cells and not context.work.root.exists()


def test_a_whole_question_on_little_data(work: Work) -> None:
    plan = plan_of(work, "ml-1m", quick=True, overrides=TINY)
    cells = {cell.method: cell for cell in plan.cells if "losses" in cell.method}
    for cell in cells.values():
        assert len(run_cell(work, cell, CPU).array()) > 0
    table = plan.table(work.find)
    losses = next(part for part in table["sections"] if part["title"].startswith("Losses"))
    assert [row[0] for row in losses["rows"]] == [variant.title for variant in QUESTIONS[0].variants]
    ahead = next(part for part in table["sections"] if "further ahead" in part["title"])
    assert [row[1] for row in ahead["rows"]] == ["5", "10"] * len(QUESTIONS[0].variants)
    assert all(row[4] == "" for row in ahead["rows"][:2]) and all(row[4] for row in ahead["rows"][2:])
    assert len(table["figures"]["comparisons"]) == 2 * 3
    dots, lines = (next(one for one in table["charts"] if one["name"] == name) for name in ("losses", "ahead"))
    assert [row["name"] for row in dots["rows"]] == [line["name"] for line in lines["lines"]]
    assert [row["values"] for row in dots["rows"]] == [[line["y"][0]] for line in lines["lines"]]
    assert all(line["x"] == [1.0, 5.0, 10.0] for line in lines["lines"])
    assert json.loads(json.dumps(table)) == table
    context = StudyContext(work, find_bench("ml-1m"), Options(study="ablations", quick=True))
    kept = work.root / "kept_ranks.npz"
    write_kept(kept, kept_options(context, plan), {"dataset": "ml-1m"}, finished(context, plan))
    assert recompute(kept)["table"] == table, "the table comes out of the kept ranks"
    words = {one["verdict"] for one in table["figures"]["comparisons"]}
    assert words <= {"within noise", "better, one seed", "worse, one seed"}, "quick: beside nothing published"
    assert {one["published"] for one in table["figures"]["comparisons"]} == {""}
    assert "second-last event of each of 40 users" in table["protocol"] and "without the items" in table["protocol"]


def test_a_ladder_compares_each_step_with_the_step_before(work: Work) -> None:
    plan = plan_of(work, "ml-1m", quick=True, overrides=TINY)
    cells = {cell.name: cell for cell in plan.cells if cell.method.startswith("ablation-ladder")}
    assert len(cells) == 6, "a quick model has no residual maps, so the last step is no step"
    for cell in cells.values():
        run_cell(work, cell, CPU)
    table = plan.table(work.find)
    steps = [one for one in table["figures"]["comparisons"] if one["question"] == "ladder"]
    titles = [variant.title for question in QUESTIONS if question.name == "ladder" for variant in question.variants]
    assert [(one["against"], one["variant"]) for one in steps[::2]] == list(itertools.pairwise(titles))
    assert steps[-1]["difference"] == 0.0 and titles[0] == "the published configuration"


# ---- positives ----


def positives(work: Work) -> dict[str, Cell]:
    cells = plan_of(work, "deskdrop", seeds=1, overrides=TINY).cells
    return {cell.method.removeprefix("ablation-positives-"): cell for cell in cells}


def test_training_ends_before_the_item_that_is_judged_is_met(work: Work) -> None:
    cell = positives(work)["all"]
    fit = JudgedFit(work, cell, cell.run_config(), CPU)
    saves = open_sequences(work.dataset(cell), SAVES, held_out=HELD_OUT).read()
    seen = fit.source.read()
    counts = dict(zip(seen.user_ids.tolist(), np.diff(seen.offsets).tolist(), strict=True))
    num_moved = 0
    for place, user in enumerate(saves.user_ids.tolist()):
        begin, end, target = saves.offsets[place], saves.offsets[place + 1], saves.targets[place]
        if target >= 0:
            met = next(one for one in range(begin, target + 1) if saves.item_ids[one] == saves.item_ids[target])
            assert fit.judge.sequences.targets[place] == met
            num_moved, end = num_moved + (met < target), met
        assert counts.get(user, 0) == end - begin
    assert num_moved > 0, "somebody met it before saving it"
    assert (seen.train_ends == seen.offsets[1:]).all(), "and all of it is trained on"
    assert not fit.judge.returns().any() and fit.judge.filter_seen
    recorded = json.loads((work.run(cell) / "config.json").read_text())
    assert recorded["data"]["dataset"] == str(work.datasets / "deskdrop-file-before-saved")


def test_all_sets_are_judged_alike(work: Work) -> None:
    results = {name: run_cell(work, cell, CPU) for name, cell in positives(work).items()}
    assert len({result.values["targets_sha256"] for result in results.values()}) == 1
    saves = open_sequences(work.datasets / "deskdrop-file", SAVES, held_out=HELD_OUT).read()
    actions = np.array(open_dataset(work.datasets / "deskdrop-file").read_events(["action"])["action"].to_pylist())
    assert set(actions[saves.targets[saves.targets >= 0]]) <= set(SAVES)
    for result in results.values():
        assert result.values["metrics"] == metrics_of(result.array())
    table = plan_of(work, "deskdrop", seeds=1, overrides=TINY).table(work.find)
    assert [part["title"][:9] for part in table["sections"]] == ["Positives", "Positives"]
    assert [len(part["rows"]) for part in table["sections"]] == [4, 6]
    views = [row[-2:] for row in table["sections"][1]["rows"] if row[0] == "and views"]
    assert views == [["and Clickthrough: Save +0.02%", "cannot tell"]] * 2, "too few users to see that there is none"
    num_users = results["all"].values["num_ranked_users"]
    assert f"of each of {num_users} users among all articles that are new to the user" in table["protocol"]


def test_positives_are_those_of_the_recipe(work: Work) -> None:
    cells = positives(work)
    fits = {
        name: JudgedFit(work, cell, dataclasses.replace(cell.run_config(), name=name), CPU)
        for name, cell in cells.items()
        if name in ("saves", "saves-views", "all")
    }
    counts = {name: int(fit.source.read().is_positive.sum()) for name, fit in fits.items()}
    assert 0 < counts["saves"] < counts["saves-views"] < counts["all"]
