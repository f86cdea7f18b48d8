"""A task on top of a model: what each arm moves, what it reads, and its cells from beginning to end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tackboard.bench.quality.cell import Machine, run_cell
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.study_plan import Options, StudyContext
from tackboard.bench.transfer.fit import ARMS, FitSettings, arm_config, judged, open_examples
from tackboard.bench.transfer.study import transfer
from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_parameters
from tackboard.core.errors import DataError, UsageError
from tackboard.evaluation.labelled_requests import METRICS, ScoredCandidates
from tackboard.events.dataset import write_dataset
from tackboard.events.public.publisher import canonical_events
from tackboard.metrics.binary import interval
from tackboard.models.changed_rows import whole_tensor
from tackboard.train.config import config_from_json

CPU = Machine(device="cpu", num_threads=1)
TINY = (
    "model.width=8",
    "model.backbone.num_layers=1",
    "model.tables.dim=2",
    "training.steps=6",
    "training.checkpoint_every=3",
)
SHORT = {"max_points": 1, "least_steps": 5, "regularisations": [[0.1, 0.0]]}


LEARNED = 0.88
"""Least AUC of an arm that has learned the task of `easy`. One of each user's five judged events is a no whatever its
item is. So no model can be above 1 − .48 / 3.08 / 2 = .92: of 3.08 times no per user, .48 have an item of a yes."""


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


def cells_of(work: Work) -> list[Cell]:
    options = Options(study="transfer", quick=True, overrides=TINY)
    return list(transfer(StudyContext(work, find_bench("ml-1m"), options)).cells)


@pytest.fixture
def cells(made_up_ratings: Callable[[Path], None], tmp_path: Path) -> tuple[Work, list[Cell]]:
    work = Work.open(tmp_path / "work")
    made_up_ratings(work.datasets / "ml-1m-file-every6")
    return work, cells_of(work)


@pytest.fixture
def easy(tmp_path: Path) -> tuple[Work, Cell]:
    """The arm from scratch on 60 users who say yes to every item below 13, and to nothing else."""
    random = np.random.default_rng(7)
    users, items = np.repeat(np.arange(1, 61), 30), random.integers(1, 26, 1800)
    actions = np.where(items < 13, "rating_5", "rating_1")
    # Only at the end of the log, which pretraining does not see.
    actions[29::30] = "rating_2"
    events = canonical_events(users, items, np.arange(1800) * 60_000, action=pa.array(actions))
    work = Work.open(tmp_path / "work")
    path = write_dataset(tmp_path / "made-up", "easy", events, source={"last_tied_share": 0.0})
    path.rename(work.datasets / "ml-1m-file-every6")
    cell = cells_of(work)[-1]
    assert cell.protocol["arm"] == "scratch" and cell.protocol["share"] == 1.0
    settings = {"learning_rates": [1e-6, 1e-2], "max_points": 3, "users_per_step": 8, "regularisations": [[0.1, 0.01]]}
    return work, dataclasses.replace(cell, protocol={**cell.protocol, **settings})


def with_protocol(cell: Cell, **changes: Any) -> Cell:
    return dataclasses.replace(cell, protocol={**cell.protocol, **changes})


def parameters_at(path: Path) -> dict[str, torch.Tensor]:
    trained = load_trained(find_checkpoint(path))
    return {name: whole_tensor(stored, path) for name, stored in stored_parameters(trained).items()}


def test_every_stage_runs_and_arms_move_what_they_should(cells: tuple[Work, list[Cell]]) -> None:
    work, every = cells
    pretrained = run_cell(work, every[0], CPU)
    known = parameters_at(pretrained.path / "checkpoint")
    assert sum(tensor.numel() for tensor in known.values()) == pretrained.values["parameters"]
    assert not (pretrained.path / "checkpoint" / "optimizer.safetensors").exists()
    arms = {
        cell.protocol["arm"]: with_protocol(cell, **SHORT)
        for cell in every[1:]
        if cell.stage == "transfer" and cell.protocol["share"] < 1.0
    }
    moved = {}
    for arm, cell in arms.items():
        result = run_cell(work, cell, CPU)
        assert 0.0 <= result.values["metrics"]["auc"] <= 1.0, arm
        assert result.values["num_examples"] == round(result.values["num_train"] / 3) > 0
        assert result.array("draws_auc").shape == (1000,)
        run = work.run(cell) / "rate-0.003-dropout-0.1-decay-0"
        config = config_from_json(json.loads((run / "config.json").read_text()))
        torch.manual_seed(cell.seed)
        before = config.model.build(open_examples(work, cell, config).vocabulary).state_dict()
        if arm != "scratch":
            before |= {f"pinfm.{name}": tensor for name, tensor in known.items()}
        after = parameters_at(run)
        moved[arm] = {name: float((after[name] - before[name]).abs().mean()) for name in after}
    assert list(moved) == list(ARMS)
    assert max(value for name, value in moved["frozen"].items() if name.startswith("pinfm.")) == 0.0
    for name in ("pinfm.item_tables.weight", "pinfm.phi_in.0.weight"):
        assert 0 < moved["fine-tuned"][name] < 0.5 * moved["scratch"][name]
    for arm in ARMS:
        assert moved[arm]["heads.0.0.weight"] > moved["fine-tuned"]["pinfm.phi_in.0.weight"]


def test_what_no_arm_can_be(cells: tuple[Work, list[Cell]]) -> None:
    work, every = cells
    with pytest.raises(UsageError, match="arm thawed"):
        run_cell(work, with_protocol(every[-1], arm="thawed"), CPU)
    frozen = next(cell for cell in every if cell.protocol.get("arm") == "frozen")
    with pytest.raises(DataError, match="its pretraining is not finished"):
        run_cell(work, dataclasses.replace(frozen, after=None), CPU)


def test_it_learns_the_task_and_takes_the_better_rate(
    easy: tuple[Work, Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work, cell = Work(Path("work")), easy[1]  # As --work mostly is: not absolute.
    result = run_cell(work, cell, CPU)
    assert result.values["metrics"]["auc"] > LEARNED
    assert result.values["learning_rate"] == 1e-2
    assert result.values["dropout"] == 0.1 and result.values["weight_decay"] == 0.01 and result.values["tries"] == 2
    for name in ("rate-1e-06-dropout-0.1-decay-0.01", "rate-0.01-dropout-0.1-decay-0.01"):
        [kept] = (work.run(cell) / name / "checkpoints").glob("step-*")
        judgements = [json.loads(line) for line in (work.run(cell) / name / "events.jsonl").read_text().splitlines()]
        best = min((one["loss"], one["step"]) for one in judgements if one["event"] == "validated")
        assert kept.name == f"step-{best[1]:08d}"
    assert result.values["steps"] == best[1] and result.values["validation_log_loss"] == round(best[0], 6)


@pytest.mark.gpu
def test_a_gpu_fits_too(easy: tuple[Work, Cell]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    result = run_cell(*easy, Machine(device="cuda"))
    assert result.values["metrics"]["auc"] > LEARNED and result.values["device"] != "cpu"


def test_from_scratch_too_the_words_are_those_of_pretraining(easy: tuple[Work, Cell]) -> None:
    work, cell = easy
    source = open_examples(work, cell, arm_config(work, cell))
    assert "rating_2" in source.dataset.actions and "rating_2" not in source.vocabulary.actions


@pytest.mark.slow
def test_a_killed_cell_goes_on_and_ends_as_if_it_had_not_been(easy: tuple[Work, Cell], tmp_path: Path) -> None:
    work, cell = easy
    cell = with_protocol(cell, learning_rates=[1e-2], max_points=8, patience=8)
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tackboard.bench.quality.cell", work.root, work.spec(cell), "cpu", "1"],
            stderr=output,
            stdout=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            end = time.monotonic() + 120
            # A judgement is told before its checkpoint stands: at the second one, that of the first does.
            while (
                "step 40: validation loss" not in log.read_text() and process.poll() is None and time.monotonic() < end
            ):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    assert work.find(cell) is None, log.read_text()
    resumed = run_cell(work, cell, CPU)
    events = [
        json.loads(line)
        for line in (work.run(cell) / "rate-0.01-dropout-0.1-decay-0.01" / "events.jsonl").read_text().splitlines()
    ]
    [again] = [event for event in events if event["event"] == "resume"]
    assert again["step"] >= 20
    other = Work.open(tmp_path / "other")
    for path in work.datasets.iterdir():
        (other.datasets / path.name).symlink_to(path)
    whole = run_cell(other, cell, CPU)
    for name in ("metrics", "validation_log_loss", "steps"):
        assert resumed.values[name] == whole.values[name]


def test_every_rate_is_tried_with_every_regularisation() -> None:
    settings = FitSettings()
    assert len(settings.learning_rates) >= 6 and len(settings.regularisations) >= 2
    assert len(set(settings.tried())) == len(settings.learning_rates) * len(settings.regularisations)
    protocol = json.loads(json.dumps(dataclasses.asdict(settings)))
    assert FitSettings.of(protocol) == settings, "as a cell on disk holds them"
    training = settings.training(100, CPU)
    assert training.precision == training.compile == "auto"


def test_steps_grow_with_the_examples() -> None:
    settings = FitSettings(users_per_step=32, steps_per_pass=100)
    assert [settings.steps_of_pass(count) for count in (1, 32, 33, 3_200, 6_400)] == [1, 1, 2, 100, 100]
    assert [settings.training(count, CPU).validate_every for count in (1, 40, 48, 100)] == [20, 20, 24, 50]


def test_judged_gives_the_metric_and_its_draws() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 400).astype(np.int8)
    answers = ScoredCandidates(
        random.normal(size=400) + labels, np.repeat(np.arange(40), 10), np.zeros(400), {"yes": labels}
    )
    metrics, arrays = judged(answers)
    assert list(metrics) == list(METRICS) and set(arrays) == {f"draws_{name}" for name in METRICS}
    for name in METRICS:
        low, high = interval(arrays[f"draws_{name}"])
        assert low < metrics[name] < high
    with pytest.raises(DataError, match="no test user has both a yes and a no"):
        judged(dataclasses.replace(answers, labels={"yes": labels * 0}))
