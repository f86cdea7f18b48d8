"""A task on top of a model: examples in; how well they are answered by the model as it was pretrained, fine-tuned, or
from scratch, out.

    history  ─ model ─►  user vector u ┐
                                       ├─ [u, z, u∘z] ─ MLP ─►  log odds
    item     ─ model ─►  item vector z ┘

The arms differ in nothing but where the model begins and what moves:

    fine-tuned   begins as pretrained and moves at a tenth of the head's rates, as published
    frozen       stays as pretrained; only the head moves
    scratch      begins at random and moves at the head's rates

Every arm tries the same number of rates, is judged on the validation users at the same places, stops when it has not
improved for as long, and is tested once, where it was best. So an arm that needs longer gets longer. `vectors` says
what the head reads: `outputs`, the unit vectors that the model compares, or `hidden`, also what they are made of.

A cell takes a minute or two and is not saved on the way: one that is stopped begins again.

Shapes: P examples of a batch, D width, E width of an item's rows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from tackboard.bench.quality_cell import Fit, Machine, Outcome, metrics_of
from tackboard.bench.quality_cells import Cell, Work
from tackboard.bench.transfer_data import (
    RunBatch,
    Runs,
    Split,
    additive_means,
    before_judging,
    facts_of,
    sample,
    split_examples,
)
from tackboard.checkpoint.store import CheckpointStore, load_checkpoint
from tackboard.core.errors import DataError, UsageError
from tackboard.core.hashing import mix64
from tackboard.core.machine import usable_cores
from tackboard.core.progress import say
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.sequences import Sequences
from tackboard.data.source import open_sequences
from tackboard.events.dataset import open_dataset
from tackboard.metrics.binary import UserResamples, auc, auc_of_users, log_losses, logit
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFM
from tackboard.train.config import RunConfig, features_for
from tackboard.train.optimizers import OptimizerConfig, Optimizers
from tackboard.train.trainer import choose_device

ARMS = {
    "fine-tuned": "pretrained, fine-tuned",
    "frozen": "pretrained, frozen",
    "scratch": "from scratch",
}
VECTORS = ("outputs", "hidden")
PRETRAINED_RATE = 0.1
"""The rates of a pretrained model over those of the head."""
ORDER_STREAM = 43
"""Keeps the order of examples apart from every other use of a seed."""
JUDGED_AT_ONCE = 128
"""Runs of events that are judged in one go."""
NUM_RESAMPLES = 1000
METRICS = ("auc", "auc_within_users", "log_loss")


# ---- the model and its head ----


class Answerer(nn.Module):
    """A model and a head that answers a yes-or-no question about a history and an item."""

    def __init__(self, model: PinFM, vectors: str, *, is_frozen: bool) -> None:
        super().__init__()
        self.model = model.requires_grad_(not is_frozen)
        self.vectors = vectors
        self.is_frozen = is_frozen
        self.head = Head(model.config.width, model.item_tables.width, vectors)

    def forward(self, batch: RunBatch) -> torch.Tensor:
        """Log odds of a yes for each example [P], from what came before it and its item."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            hidden_PD, user_PD = self.model.encode_before(batch.histories, batch.events)
            item_P = batch.histories.items.index_select(0, batch.events)
            rows_PK = batch.histories.item_rows.index_select(0, item_P)
            item_PD = self.model.encode_items(rows_PK)
            rows_PE = self.model.item_tables(rows_PK)
        answer: torch.Tensor = self.head(user_PD, item_PD, hidden_PD, rows_PE)
        return answer

    def learn(self) -> None:
        """Ready to train: a frozen model does not drop anything out."""
        self.train()
        if self.is_frozen:
            self.model.eval()


class Head(nn.Module):
    """An MLP over two unit vectors and their product, and with `hidden` over what they are made of."""

    def __init__(self, width: int, item_width: int, vectors: str, dropout: float = 0.1) -> None:
        super().__init__()
        self.reads_hidden = vectors == "hidden"
        self.norms = nn.ModuleList([nn.LayerNorm(size) for size in ((width, item_width) if self.reads_hidden else ())])
        num_read = 3 * width + (width + item_width if self.reads_hidden else 0)
        self.mlp = nn.Sequential(
            nn.Linear(num_read, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, 1)
        )

    def forward(
        self, user_PD: torch.Tensor, item_PD: torch.Tensor, hidden_PD: torch.Tensor, rows_PE: torch.Tensor
    ) -> torch.Tensor:
        """Log odds [P]."""
        scale = math.sqrt(user_PD.shape[1])
        # Entries of unit vectors are about 1/√D: brought to about 1 here, and their products too.
        parts = [user_PD * scale, item_PD * scale, user_PD * item_PD * scale**2]
        if self.reads_hidden:
            parts += [norm(part) for norm, part in zip(self.norms, (hidden_PD, rows_PE), strict=True)]
        found: torch.Tensor = self.mlp(torch.cat(parts, dim=1)).squeeze(1)
        return found


# ---- a fit ----


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How an arm is fit; a cell's protocol holds these by name."""

    learning_rates: tuple[float, ...] = (3e-3, 1e-3)
    """Rates of the head that are tried, chosen between on validation."""
    runs_per_step: int = 32
    """Runs of events in a step at least."""
    steps_per_pass: int = 100
    """Steps in which all examples are read once, at most: where there are many, steps are larger instead."""
    least_steps: int = 20
    """Steps between judgements at least; otherwise half a pass over the examples."""
    max_points: int = 40
    """Judgements at most."""
    patience: int = 4
    """Judgements without improvement after which a fit ends."""

    def size_of_step(self, num_runs: int) -> int:
        """Runs of events in a step, where there are so many."""
        return max(self.runs_per_step, -(-num_runs // self.steps_per_pass))

    @classmethod
    def of(cls, protocol: Mapping[str, Any]) -> FitSettings:
        """The settings that a protocol holds."""
        names = [field.name for field in dataclasses.fields(cls)]
        chosen = {name: protocol[name] for name in names if name in protocol}
        return cls(**chosen | {"learning_rates": tuple(protocol.get("learning_rates", cls.learning_rates))})


@dataclasses.dataclass
class Best:
    """Where a fit was best on validation."""

    log_loss: float = float("inf")
    step: int = 0
    learning_rate: float = 0.0
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class ArmFit:
    """One arm on some examples."""

    def __init__(
        self,
        answerer: Answerer,
        settings: FitSettings,
        seed: int,
        rate: float,
        device: torch.device,
        table_rate: float = 100.0,
    ) -> None:
        """`rate` is the head's. `table_rate` is that of tables (row-wise Adagrad) over that of dense parameters."""
        self.answerer = answerer.to(device)
        self.settings, self.seed, self.device = settings, seed, device
        self.learning_rate, self.table_rate = rate, table_rate
        self.curve: list[dict[str, float]] = []

    def run(self, train: Runs, validation: Runs, best: Best, share: float) -> Best:
        """Fits until nothing improves; gives the better of `best` and what was found. `share`: of the model's rates."""
        batches = [validation.batch(chosen).to(self.device) for chosen in validation.in_order(JUDGED_AT_ONCE)]
        movers = [self._optimizers(self.answerer.head, 1.0)]
        if not self.answerer.is_frozen:
            movers.append(self._optimizers(self.answerer.model, share))
        settings, step, epoch, since, mine = self.settings, 0, 0, 0, float("inf")
        per_step = settings.size_of_step(len(train))
        every = max(settings.least_steps, -(-len(train) // (2 * per_step)))
        while True:
            for chosen in train.shuffled(per_step, self.seed, ORDER_STREAM, epoch):
                self._step(train.batch(chosen).to(self.device), movers, step)
                step += 1
                if step % every:
                    continue
                loss = float(log_losses(_answers(self.answerer, batches), validation.examples.labels).mean())
                self.curve.append({"step": step, "log_loss": round(loss, 6)})
                since = 0 if loss < mine else since + 1
                mine = min(mine, loss)
                if loss < best.log_loss:
                    state = {name: value.clone() for name, value in self.answerer.state_dict().items()}
                    best = Best(loss, step, self.learning_rate, state)
                if since >= settings.patience or len(self.curve) >= settings.max_points:
                    return best
            epoch += 1

    def _optimizers(self, module: nn.Module, share: float) -> Optimizers:
        config = OptimizerConfig(
            dense_learning_rate=self.learning_rate * share,
            table_learning_rate=self.learning_rate * share * self.table_rate,
            warmup_steps=self.settings.least_steps,
            final_share=1.0,
        )
        return Optimizers(module, config, total_steps=1, seed=self.seed)

    def _step(self, batch: RunBatch, movers: Sequence[Optimizers], step: int) -> None:
        torch.manual_seed(int(mix64(self.seed * 1_000_003 + step, 19)[0] >> 1))
        self.answerer.learn()
        for mover in movers:
            mover.prepare(step)
        functional.binary_cross_entropy_with_logits(self.answerer(batch), batch.labels).backward()
        for mover in movers:
            mover.clip()
            mover.step()


def answers(answerer: Answerer, runs: Runs, device: torch.device) -> NDArray[np.float64]:
    """Log odds of each example of `runs`, in their order [E]."""
    return _answers(answerer, (runs.batch(chosen).to(device) for chosen in runs.in_order(JUDGED_AT_ONCE)))


def _answers(answerer: Answerer, batches: Any) -> NDArray[np.float64]:
    answerer.eval()
    with torch.no_grad():
        found = [answerer(batch).double().cpu() for batch in batches]
    return np.asarray(torch.cat(found).numpy()) if found else np.zeros(0)


def judged(logits: NDArray[np.float64], split: Split) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """(metrics on the test examples, the same over draws of test users), by name."""
    labels, users = split.test.labels, split.test.dense_users()
    losses, within = log_losses(logits, labels), auc_of_users(logits, labels, users)
    if np.isnan(within).all():
        raise DataError("no test user has a yes and a no", allowed="needed: examples of both kinds to tell them apart")
    draws = UserResamples(users, NUM_RESAMPLES)
    metrics = dict(zip(METRICS, (auc(logits, labels), np.nanmean(within), losses.mean()), strict=True))
    over_draws = zip(
        METRICS, (draws.auc(logits, labels), draws.mean_of_users(within), draws.mean(losses)), strict=True
    )  # fmt: skip
    return (
        {name: round(float(value), 6) for name, value in metrics.items()},
        {f"draws_{name}": np.asarray(values, dtype=np.float32) for name, values in over_draws},
    )


# ---- the stages ----


def run_pretraining(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Pretrains to the end of the schedule, and keeps the parameters in the result: all that later cells need."""
    fit = Fit(work, cell, cell.run_config(), machine)
    fit.train(judge_always=False)
    ranks = fit.ranks_at(fit.last_step())
    values = fit.values() | {"metrics": metrics_of(ranks)}
    path = CheckpointStore(RunDirectory.open(work.run(cell)).checkpoints).find_latest()
    if path is None:
        raise DataError(f"{work.run(cell)} has no checkpoint", fix="remove that folder, and it is pretrained again")
    checkpoint = load_checkpoint(path, groups=("dense", "tables"))
    model = _model(work, cell, cell.prepared)
    model.load_state_dict(checkpoint.tensors["dense"] | checkpoint.tensors["tables"])
    return values, {"ranks": ranks, "parameters": parameters_of(model)}


def run_transfer(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits one arm on so many examples and tests it once."""
    started, protocol, config = time.perf_counter(), cell.protocol, cell.run_config()
    arm, settings, device = str(protocol["arm"]), FitSettings.of(protocol), choose_device(machine.device)
    if arm not in ARMS or protocol["vectors"] not in VECTORS:
        raise UsageError(f"arm {arm}, vectors {protocol['vectors']}", allowed=f"{', '.join((*ARMS, *VECTORS))}")
    torch.set_num_threads(machine.num_threads or usable_cores())
    torch.use_deterministic_algorithms(device.type == "cpu")
    sequences = open_task(work, cell, config)
    split = split_examples(sequences)
    parts = (sample(split.train, int(protocol["num_examples"]), cell.seed), split.validation, split.test)
    runs = [Runs(sequences, part, config.model.tables, config.model.max_history) for part in parts]
    # Tables move as much faster than the rest as they did in pretraining.
    table_rate = config.optimizer.table_learning_rate / config.optimizer.dense_learning_rate
    best, curves = Best(), []
    for rate in settings.learning_rates:
        answerer = _answerer(work, cell)
        fit = ArmFit(answerer, settings, cell.seed, rate, device, table_rate)
        best = fit.run(runs[0], runs[1], best, 1.0 if arm == "scratch" else PRETRAINED_RATE)
        curves.append({"learning_rate": rate, "points": fit.curve})
        say(f"{arm}, rate {rate}: log-loss {min(point['log_loss'] for point in fit.curve):.4f} on validation")
    if not best.state:
        raise DataError(f"{cell.label}: no judgement was a number")
    answerer = _answerer(work, cell).to(device)
    answerer.load_state_dict(best.state)
    metrics, arrays = judged(answers(answerer, runs[2], device), split)
    values = {
        "metrics": metrics,
        "validation_log_loss": round(best.log_loss, 6),
        "learning_rate": best.learning_rate,
        "steps": best.step,
        "epochs": round(best.step * settings.size_of_step(len(runs[0])) / len(runs[0]), 2),
        "num_examples": len(parts[0]),
        "curves": curves,
        **facts_of(split),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    return values, arrays


def run_means(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Answers by the mean of the item, or of item and user: over so many examples, or over all that could be known."""
    del machine
    started, sequences = time.perf_counter(), open_task(work, cell, cell.run_config())
    split = split_examples(sequences)
    known = [(False, sample(split.train, int(count), cell.seed)) for count in cell.protocol["sizes"]]
    rows: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for is_all, examples in [*known, (True, before_judging(sequences))]:
        for with_users in (False, True):
            means = additive_means(examples, sequences.item_ids, split.test, with_users=with_users)
            metrics, arrays = judged(logit(means), split)
            about = {"with_users": with_users, "all_known": is_all, "num_examples": len(examples)}
            rows.append(about | {"metrics": metrics})
    # The last of them knows most: its draws are kept, to compare others with it.
    return {"means": rows, **facts_of(split), "seconds": round(time.perf_counter() - started, 1)}, arrays


def open_task(work: Work, cell: Cell, config: RunConfig) -> Sequences:
    """The sequences of the whole dataset, whose `is_positive` are the answers, as the pretrained model reads them."""
    actions = tuple(cell.protocol["actions"])
    vocabulary = _vocabulary(work, str(cell.protocol["pretrained_on"]))
    features = features_for(config)
    return open_sequences(work.dataset(cell), actions, held_out=0, vocabulary=vocabulary, features=features).read()


def _answerer(work: Work, cell: Cell) -> Answerer:
    """A fresh one: its head, and in the arm `scratch` its model, are drawn by the cell's seed."""
    arm = str(cell.protocol["arm"])
    torch.manual_seed(cell.seed)
    model = _model(work, cell, str(cell.protocol["pretrained_on"]))
    if arm != "scratch":
        result = work.find(cell.after) if cell.after is not None else None
        if result is None:
            raise DataError(f"{cell.label} has no pretrained model to begin with")
        load_parameters(model, result.array("parameters"))
    return Answerer(model, str(cell.protocol["vectors"]), is_frozen=arm == "frozen")


def _model(work: Work, cell: Cell, pretrained_on: str) -> PinFM:
    model = build_model(cell.run_config().model, _vocabulary(work, pretrained_on))
    if not isinstance(model, PinFM):
        raise UsageError(f"{type(model).__name__} cannot be transferred", allowed="allowed: PinFM")
    return model


def _vocabulary(work: Work, prepared: str) -> Vocabulary:
    """The actions and surfaces that a model pretrained on a dataset knows."""
    dataset = open_dataset(work.datasets / prepared, verify=False)
    return Vocabulary(actions=tuple(dataset.actions), surfaces=tuple(dataset.surfaces))


def parameters_of(model: nn.Module) -> NDArray[np.float32]:
    """All parameters end to end."""
    flat = [parameter.detach().float().cpu().flatten() for parameter in model.parameters()]
    return np.asarray(torch.cat(flat).numpy())


@torch.no_grad()
def load_parameters(model: nn.Module, flat: NDArray[np.float32]) -> None:
    """Takes over what `parameters_of` gave of a model of the same config."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    if sum(sizes) != len(flat):
        raise DataError(f"{len(flat):,} parameters for a model of {sum(sizes):,}")
    pieces = torch.from_numpy(copy.copy(flat)).split(sizes)
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.copy_(piece.view_as(parameter))
