"""A task on top of a model: what each arm moves, what it reads, and its cells from beginning to end."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tackboard.bench.quality_cell import Machine, run_cell
from tackboard.bench.quality_cells import Cell, Work
from tackboard.bench.quality_data import find_bench
from tackboard.bench.quality_plan import Context, Options
from tackboard.bench.transfer import transfer
from tackboard.bench.transfer_data import Examples, Runs, Split, sample, split_examples
from tackboard.bench.transfer_fit import (
    METRICS,
    Answerer,
    ArmFit,
    Best,
    FitSettings,
    answers,
    judged,
    load_parameters,
    parameters_of,
)
from tackboard.core.errors import DataError, UsageError
from tackboard.data.loader import stored_batch
from tackboard.data.sequences import Sequences
from tackboard.data.source import open_sequences
from tackboard.events.dataset import write_dataset
from tackboard.events.public.publisher import canonical_events
from tackboard.features.standard import features_for_model
from tackboard.metrics.binary import auc, interval
from tackboard.models.backbone import BackboneConfig
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig

CPU = torch.device("cpu")
CONFIG = PinFMConfig(
    tables=TableConfig(num_hashes=2, num_rows=64, dim=4),
    width=16,
    backbone=BackboneConfig(num_layers=1),
    max_history=16,
    request_time=True,
)
TINY = ("model.width=8", "model.backbone.num_layers=1", "model.tables.dim=2", "training.steps=6",
        "training.checkpoint_every=3")  # fmt: skip


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    """60 users who say yes to every item below 13, and to nothing else."""
    random = np.random.default_rng(7)
    users, items = np.repeat(np.arange(1, 61), 30), random.integers(1, 26, 1800)
    actions = np.where(items < 13, "yes", "no")
    events = canonical_events(users, items, np.arange(1800) * 60_000, action=pa.array(actions))
    path = write_dataset(tmp_path_factory.mktemp("datasets"), "made-up", events)
    return open_sequences(
        path, ("yes",), held_out=0, features=lambda words: features_for_model(CONFIG.reads, words, CONFIG.max_history)
    ).read()


def model_of(sequences: Sequences, seed: int = 0, config: PinFMConfig = CONFIG) -> PinFM:
    torch.manual_seed(seed)
    return config.build(sequences.vocabulary)


def runs_of(sequences: Sequences, examples: Examples) -> Runs:
    return Runs(sequences, examples, CONFIG.tables, CONFIG.max_history)


def test_vectors_are_those_of_the_history_alone(sequences: Sequences) -> None:
    """The slow twin: each history on its own, ended by a request at the time of the example."""
    model = model_of(sequences).eval()
    runs = runs_of(sequences, sample(split_examples(sequences).train, 30, 0))
    batch = runs.batch(np.arange(len(runs)))
    with torch.no_grad():
        hidden, found = model.encode_before(batch.histories, batch.events)
    assert hidden.shape == found.shape
    starts = np.repeat(runs.starts, np.diff(runs.bounds))
    for place, (event, user) in enumerate(zip(runs.examples.events, runs.examples.users, strict=True)):
        ended = dataclasses.replace(sequences, targets=np.full(len(sequences.user_ids), event))
        alone = stored_batch(
            ended, np.array([user]), starts[place : place + 1], event - starts[place : place + 1], CONFIG.tables
        )
        with torch.no_grad():
            assert torch.allclose(model.encode_users(alone)[0], found[place], atol=1e-5)


def test_the_answer_knows_neither_the_action_of_its_event_nor_what_follows(sequences: Sequences) -> None:
    runs = runs_of(sequences, sample(split_examples(sequences).train, 30, 0))
    answerer = Answerer(model_of(sequences), "hidden", is_frozen=False).eval()
    one = runs.batch(np.array([0]))
    column = one.histories.columns["action"].clone()
    last = int(one.events[-1])
    column[last:] = (column[last:] + 1) % 2
    other = dataclasses.replace(
        one, histories=dataclasses.replace(one.histories, columns={**one.histories.columns, "action": column})
    )
    with torch.no_grad():
        assert torch.equal(answerer(one), answerer(other))
        column[last - 1] = (column[last - 1] + 1) % 2
        assert not torch.equal(answerer(one), answerer(other)), "the rating before it is known"


@pytest.mark.parametrize("vectors", ["outputs", "hidden"])
def test_what_moves(sequences: Sequences, vectors: str) -> None:
    split = split_examples(sequences)
    runs = runs_of(sequences, sample(split.train, 40, 0))
    settings = FitSettings(learning_rates=(1e-2,), max_points=1, least_steps=5)
    moved = {}
    for name, is_frozen, share in (("frozen", True, 0.1), ("fine-tuned", False, 0.1), ("scratch", False, 1.0)):
        torch.manual_seed(1)
        answerer = Answerer(model_of(sequences), vectors, is_frozen=is_frozen)
        before = {key: value.clone() for key, value in answerer.state_dict().items()}
        ArmFit(answerer, settings, 0, 1e-2, CPU).run(runs, runs, Best(), share)
        change = {key: float((value - before[key]).abs().mean()) for key, value in answerer.state_dict().items()}
        moved[name] = change
    table, dense, head = "model.item_tables.weight", "model.phi_in.0.weight", "head.mlp.0.weight"
    assert max(value for key, value in moved["frozen"].items() if key.startswith("model.")) == 0.0
    assert moved["frozen"][head] > 0
    for key in (table, dense):
        assert 0 < moved["fine-tuned"][key] < 0.5 * moved["scratch"][key]
    assert moved["fine-tuned"][head] > moved["fine-tuned"][dense]


def test_it_learns_the_task_and_keeps_the_best(sequences: Sequences) -> None:
    split = split_examples(sequences)
    train, validation = runs_of(sequences, split.train), runs_of(sequences, split.validation)
    fit = ArmFit(
        Answerer(model_of(sequences), "outputs", is_frozen=False),
        FitSettings(max_points=4, runs_per_step=8),
        seed=0,
        rate=1e-2,
        device=CPU,
    )
    best = fit.run(train, validation, Best(), 1.0)
    assert best.log_loss == pytest.approx(min(point["log_loss"] for point in fit.curve), abs=1e-6)
    assert best.step in [point["step"] for point in fit.curve]
    fit.answerer.load_state_dict(best.state)
    found = answers(fit.answerer, runs_of(sequences, split.test), CPU)
    assert auc(found, split.test.labels) > 0.9
    assert fit.run(train, validation, Best(log_loss=0.0), 1.0).log_loss == 0.0, "what is better stays"


def test_steps_grow_with_the_examples() -> None:
    settings = FitSettings(runs_per_step=32, steps_per_pass=100)
    assert [settings.size_of_step(count) for count in (1, 3_200, 3_201, 6_400)] == [32, 32, 33, 64]


def test_judged_gives_the_metric_and_its_draws(sequences: Sequences) -> None:
    split = split_examples(sequences)
    logits = np.random.default_rng(0).normal(size=len(split.test)) + split.test.labels
    metrics, arrays = judged(logits, split)
    assert list(metrics) == list(METRICS) and set(arrays) == {f"draws_{name}" for name in METRICS}
    for name in METRICS:
        low, high = interval(arrays[f"draws_{name}"])
        assert low < metrics[name] < high
    alike = Split(split.train, split.validation, dataclasses.replace(split.test, labels=split.test.labels & False))
    with pytest.raises(DataError, match="no test user has a yes and a no"):
        judged(logits, alike)


def test_parameters_go_and_come_back(sequences: Sequences) -> None:
    one, other = model_of(sequences, 0), model_of(sequences, 1)
    load_parameters(other, parameters_of(one))
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    stored = dataclasses.replace(CONFIG.tables, storage="bf16")
    half = model_of(sequences, 2, dataclasses.replace(CONFIG, tables=stored))
    load_parameters(half, parameters_of(one))
    assert half.item_tables.weight.dtype == torch.bfloat16
    with pytest.raises(DataError, match="parameters for a model of"):
        load_parameters(other, np.zeros(3, dtype=np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_gpu_fits_and_answers_the_same(sequences: Sequences, is_frozen: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    split, gpu = split_examples(sequences), torch.device("cuda")
    runs = runs_of(sequences, split.train)
    torch.manual_seed(0)
    answerer = Answerer(model_of(sequences), "hidden", is_frozen=is_frozen)
    before = answers(answerer, runs, CPU)
    assert np.allclose(answers(answerer.to(gpu), runs, gpu), before, atol=1e-3)
    fit = ArmFit(answerer, FitSettings(max_points=2, runs_per_step=8), 0, 1e-2, gpu)
    best = fit.run(runs, runs_of(sequences, split.validation), Best(), 0.1)
    assert best.log_loss < 0.8 and not np.allclose(answers(fit.answerer, runs, gpu), before, atol=1e-3)


# ---- the stages ----


@pytest.fixture
def cells(made_up_ratings: Callable[[Path], None], tmp_path: Path) -> tuple[Work, list[Cell]]:
    work = Work.open(tmp_path / "work")
    made_up_ratings(work.datasets / "ml-1m-file-every6")
    options = Options(study="transfer", quick=True, overrides=TINY)
    return work, list(transfer(Context(work, find_bench("ml-1m"), options)).cells)


def with_protocol(cell: Cell, **changes: Any) -> Cell:
    return dataclasses.replace(cell, protocol={**cell.protocol, **changes})


def test_every_stage(cells: tuple[Work, list[Cell]]) -> None:
    work, every = cells
    machine = Machine(device="cpu", num_threads=1)
    pretrained = run_cell(work, every[0], machine)
    assert len(pretrained.array("parameters")) == pretrained.values["parameters"]
    means = run_cell(work, every[1], machine)
    assert [row["all_known"] for row in means.values["means"]] == [False] * 4 + [True] * 2
    arms = {cell.protocol["arm"]: cell for cell in every[2:] if not cell.protocol["num_examples"]}
    for arm, cell in arms.items():
        result = run_cell(work, with_protocol(cell, max_points=1), machine)
        assert 0.0 <= result.values["metrics"]["auc"] <= 1.0, arm
        assert result.values["num_examples"] == result.values["num_train"] > 0
        assert result.array("draws_auc").shape == (1000,)
    with pytest.raises(UsageError, match="arm thawed"):
        run_cell(work, with_protocol(arms["scratch"], arm="thawed"), machine)
    with pytest.raises(DataError, match="no pretrained model"):
        run_cell(work, dataclasses.replace(arms["frozen"], after=None), machine)
