"""One cell, from its description to its result, on made-up ratings."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality import cell as quality_cell
from tackboard.bench.quality.cell import (
    CUTOFFS,
    Fit,
    Judge,
    Machine,
    chosen_events,
    metrics_of,
    run_cell,
    step_of,
)
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.methods import METHODS
from tackboard.bench.quality.study_plan import Options, StudyContext
from tackboard.core.errors import DataError, Preempted, UsageError
from tackboard.data.source import open_sequences
from tackboard.evaluation.baselines import RecentlySeen
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.flow.jobs import JobRunner

CPU = Machine(device="cpu", num_threads=1)
SMALL = ("training.steps=6", "training.checkpoint_every=2", "model.width=8",
         "sasrec-history:model.backbone.ffn_width=8", "pinfm-history:model.tables.dim=1",
         "model.backbone.num_layers=1")  # fmt: skip
SOURCE = Path(quality_cell.__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


@pytest.fixture
def context(fake_ml_1m: Path, tmp_path: Path) -> StudyContext:
    work = Work.open(tmp_path / "work")
    return StudyContext(work, find_bench("ml-1m"), Options(overrides=SMALL), fake_ml_1m)


def cell_of(context: StudyContext, method: str, stage: str, after: Cell | None = None, **protocol: Any) -> Cell:
    place = context.places(("file",))["file"]
    return context.cell(place, "file", METHODS[method], 0, stage, after, **protocol)


def test_baseline_ranks_by_its_scores(context: StudyContext) -> None:
    cell = cell_of(context, "item-to-item", "baseline")
    result = run_cell(context.work, cell, CPU)
    ranks = result.array()
    # Each film is followed by the next, and three share a second in the order of the file.
    assert len(ranks) == 24 and (ranks < 10).all()
    assert result.values["metrics"] == metrics_of(ranks)
    assert set(result.values["metrics"]) == {f"{name}@{k}" for name in ("hr", "ndcg") for k in CUTOFFS}
    assert result.values["num_items"] == 35, "films that nobody rated are ranked too"
    assert not result.array("returns").any()
    assert result.array("users").tolist() == list(range(24))
    assert result.array("gaps").tolist() == [0] * 24, "the last three events of each user share a second"
    assert run_cell(context.work, cell, CPU).path == result.path


def test_validation_chooses_steps_and_the_test_refits_for_them(context: StudyContext) -> None:
    validation = cell_of(context, "sasrec-history", "validate")
    test_cell = cell_of(context, "sasrec-history", "test", validation)
    with pytest.raises(DataError, match="which is not finished"):
        run_cell(context.work, test_cell, CPU)
    found = run_cell(context.work, validation, CPU)
    assert [point["step"] for point in found.values["curve"]] == [2, 4, 6]
    best = max(found.values["curve"], key=lambda point: (point["ndcg@10"], -point["step"]))
    assert found.values["chosen_steps"] == best["step"]
    assert found.values["metrics"] == {key: value for key, value in best.items() if key != "step"}
    result = run_cell(context.work, test_cell, CPU)
    assert result.values["steps"] == best["step"]
    assert {"parameters", "seconds", "tokens", "tokens_per_s", "peak_rss_bytes", "date"} <= set(result.values)
    recorded = json.loads((context.work.run(test_cell) / "config.json").read_text())
    assert (recorded["data"]["held_out"], recorded["optimizer"]["schedule_steps"]) == (1, 6)
    assert json.loads((context.work.run(validation) / "config.json").read_text())["data"]["held_out"] == 2
    assert len(list((context.work.run(validation) / "checkpoints").glob("step-*"))) == 1, "the last alone is kept"
    # What is ranked differs by one event.
    sequences = {
        held_out: open_sequences(context.work.dataset(validation), held_out=held_out).read() for held_out in (1, 2)
    }
    assert (sequences[1].targets - sequences[2].targets == 1).all()


def test_published_keeps_the_best_and_the_last(context: StudyContext) -> None:
    result = run_cell(context.work, cell_of(context, "pinfm-history", "published", filter_newest=5), CPU)
    curve = {point["step"]: point for point in result.values["curve"]}
    assert result.values["metrics"]["ndcg@10"] == curve[6]["ndcg@10"]
    assert result.values["best_metrics"]["ndcg@10"] == max(point["ndcg@10"] for point in curve.values())
    assert metrics_of(result.array("ranks_best")) == result.values["best_metrics"]


def test_stopped_run_goes_on_to_the_same_ranks(context: StudyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the checkpoint of step 4 and its ranking: it is ranked when the run is taken up again."""
    cell = cell_of(context, "sasrec-history", "validate")
    whole = run_cell(Work.open(context.work.root.parent / "other"), _with_data(cell, context), CPU)
    judge = Fit._judge

    def stop(self: Fit, model: Any, step: int) -> None:
        if step == 4:
            raise Preempted("stopped")
        judge(self, model, step)

    with monkeypatch.context() as patched:
        patched.setattr(Fit, "_judge", stop)
        with pytest.raises(Preempted):
            run_cell(context.work, cell, CPU)
    assert context.work.find(cell) is None
    assert sorted(path.name for path in (context.work.run(cell) / "ranks").iterdir()) == ["step-00000002.npy"]
    resumed = run_cell(context.work, cell, CPU)
    assert resumed.values["curve"] == whole.values["curve"]
    assert resumed.array().tolist() == whole.array().tolist()
    assert resumed.values["tokens"] == whole.values["tokens"]


def _with_data(cell: Cell, context: StudyContext) -> Cell:
    """Prepares the dataset of a cell in another folder of work, too."""
    other = StudyContext(Work.open(context.work.root.parent / "other"), context.bench, context.options, context.data)
    other.places((cell.ties,))
    return cell


def test_filter_of_the_newest_leaves_older_items_in_the_ranking(context: StudyContext) -> None:
    cell = cell_of(context, "popularity", "baseline")
    sequences = open_sequences(context.work.dataset(cell), held_out=1).read()

    def flat(judged: JudgedEvents) -> np.ndarray[Any, Any]:
        return np.zeros((len(judged), len(sequences.catalogue)), dtype=np.float32)

    # All scores are equal and ties count against the target: its rank is the number of other items in the ranking.
    for newest, expected in ((0, 35 - 11 - 1), (4, 35 - 4 - 1)):
        judge = Judge(sequences, {"filter_seen": True, "filter_newest": newest})
        assert (judge.rank(flat) == expected).all()
    assert (Judge(sequences, {"filter_seen": False}).rank(flat) == 34).all()


def test_ranked_users_are_drawn_by_their_ids(context: StudyContext) -> None:
    cell = cell_of(context, "popularity", "baseline")
    sequences = open_sequences(context.work.dataset(cell), held_out=1).read()
    some = chosen_events(sequences, 7).users
    assert len(some) == 7 and (np.diff(some) > 0).all()
    assert chosen_events(sequences, 7).users.tolist() == some.tolist()
    assert set(some) <= set(chosen_events(sequences, 12).users), "fewer are a part of more"
    assert chosen_events(sequences, 0).users.tolist() == list(range(24))


def test_what_was_judged_is_told_by_its_events(context: StudyContext) -> None:
    path = context.work.dataset(cell_of(context, "popularity", "baseline"))

    def judged(**options: Any) -> str:
        sequences = open_sequences(path, **options).read()
        return str(Judge(sequences, {"filter_seen": True}).facts()["targets_sha256"])

    high = ("rating_3", "rating_4", "rating_5")
    hashes = [judged(), judged(held_out=2), judged(positive_actions=high)]
    assert len(set(hashes)) == 3, "the same users, other events"
    assert judged() == hashes[0]


def test_recently_seen_scores_the_newest_highest(context: StudyContext) -> None:
    cell = cell_of(context, "popularity", "baseline")
    sequences = open_sequences(context.work.dataset(cell), held_out=1).read()
    judged = JudgedEvents(np.array([3]), sequences.targets[3:4])
    scores = RecentlySeen(sequences).score(judged)[0]
    begin, end = sequences.offsets[3], sequences.train_ends[3]
    newest_first = sequences.catalogue[np.argsort(-scores, kind="stable")][: end - begin]
    assert newest_first.tolist() == sequences.item_ids[begin:end][::-1].tolist()


def test_unknown_stage(context: StudyContext) -> None:
    with pytest.raises(UsageError, match=r"did you mean validate\?"):
        run_cell(context.work, dataclasses.replace(cell_of(context, "popularity", "validat")), CPU)


def start(context: StudyContext, cell: Cell) -> "subprocess.Popen[bytes]":
    """The process of a cell, as the pool starts it."""
    arguments = [str(context.work.root), str(context.work.spec(cell)), "cpu", "1"]
    with context.work.log(cell).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tackboard.bench.quality.cell", *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            stderr=log,
        )


@pytest.mark.slow
def test_process_of_its_own(context: StudyContext) -> None:
    good, bad = cell_of(context, "popularity", "baseline"), cell_of(context, "pinfm-history", "test")
    codes = [run.wait() for run in [start(context, cell) for cell in (good, bad)]]
    assert codes == [0, DataError.exit_code]
    assert "done: " in context.work.log(good).read_text() and context.work.find(good) is not None
    assert "error: " in context.work.log(bad).read_text() and context.work.find(bad) is None


def test_step_of_a_cell(context: StudyContext) -> None:
    validation = cell_of(context, "pinfm-history", "validate")
    cell = dataclasses.replace(cell_of(context, "popularity", "baseline"), after=validation)
    step = step_of(context.work, cell, "cpu")
    assert (step.name, step.label, step.log) == (cell.name, cell.label, context.work.log(cell))
    assert step.after is not None and step.after.name == validation.name and step.after.after is None
    folder, spec, device, threads = step.command(3)[3:]
    assert (folder, device, threads) == (str(context.work.root), "cpu", "3")
    assert json.loads(Path(spec).read_text()) == cell.describe()
    alone = step_of(context.work, cell_of(context, "popularity", "baseline"), "cpu")
    assert not alone.is_finished() and alone.figures() == []
    report = JobRunner(jobs=0).run([alone])
    assert report.num_done == 1 and alone.is_finished()
    assert [word.split()[0] for word in alone.figures()] == ["hr@10", "ndcg@10"]
    assert JobRunner().run([alone]).num_found == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_cell_goes_on_to_the_same_ranks(context: StudyContext, number: int) -> None:
    context.options = Options(overrides=(*SMALL, "training.steps=400", "training.checkpoint_every=20"))
    cell = cell_of(context, "pinfm-history", "validate")
    other = StudyContext(Work.open(context.work.root.parent / "other"), context.bench, context.options, context.data)
    other.places(("file",))
    assert start(other, cell).wait() == 0, other.work.log(cell).read_text()
    run = start(context, cell)
    while len(list((context.work.run(cell) / "ranks").glob("*.npy"))) < 3:
        assert run.poll() is None, context.work.log(cell).read_text()
        time.sleep(0.01)
    run.send_signal(number)
    assert run.wait() == (Preempted.exit_code if number == signal.SIGTERM else -signal.SIGKILL)
    assert context.work.find(cell) is None
    assert start(context, cell).wait() == 0, context.work.log(cell).read_text()
    resumed, whole = context.work.find(cell), other.work.find(cell)
    assert resumed is not None and whole is not None
    assert resumed.array().tolist() == whole.array().tolist()
    assert resumed.values["curve"] == whole.values["curve"]
