"""Does the work of the transfer study: pretrains a model, trains each arm on examples of the task, and tests the arms.

An arm is a ranker (models/ranker.py): a model with a head. It is trained on labelled requests like any other run. The
arms differ only in the initial parameters of the model and in the learning rates of the model:

    fine-tuned   the pretrained model is trained at a tenth of the head's learning rates, as published
    frozen       the pretrained model does not change; only the head is trained
    scratch      the model begins with random parameters and is trained at the head's learning rates

Every arm tries the same settings: each learning rate of the head with each regularisation (a dropout and a weight
decay). Each setting has a separate run in the run folder of the cell. All runs are judged on the validation users at
the same steps. A run stops after a fixed number of judgements without improvement, so an arm that needs longer may
train longer. The best run is tested once, at its best step. If a cell is killed, the next call continues its runs.
Pretrained arms begin from the checkpoint that the pretraining cell has saved.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig
from tackboard.bench.quality.cell import Fit, Machine, Outcome
from tackboard.bench.quality.cell import metrics_of as ranking_metrics
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.transfer.data import VALIDATION_USERS, YES, Examples, task_dataset
from tackboard.checkpoint.store import CheckpointStore, find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_parameters
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import read_json, remove_directory
from tackboard.core.progress import say
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import Part
from tackboard.data.request_layout import read_requests
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.evaluation.labelled_requests import METRICS, ScoredCandidates, answer, metrics_of
from tackboard.events.dataset import open_dataset
from tackboard.features.feature_set import FILE_NAME as FEATURES
from tackboard.metrics.binary import UserResamples, auc_of_users, log_losses
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import HeadConfig, RankerConfig
from tackboard.models.stored_parameters import load_parameters
from tackboard.train.config import RunConfig, StartConfig, TrainingConfig, config_to_json, features_for
from tackboard.train.optimizers import OptimizerConfig
from tackboard.train.trainer import Trainer

ARMS = {
    "fine-tuned": "pretrained, fine-tuned",
    "frozen": "pretrained, frozen",
    "scratch": "from scratch",
}
RATES = {"fine-tuned": {"pinfm.": 0.1}, "frozen": {"pinfm.": 0.0}, "scratch": {}}
"""Arm → learning rates of the model as a share of the learning rates of the head."""
VECTORS = ("outputs", "hidden")
NUM_RESAMPLES = 1000
CHECKPOINT = "checkpoint"
"""Name of the folder with the parameters in the result of pretraining."""
UNLIMITED = 1 << 40
"""A limit on the number of tokens or steps. It is so large that no pass reaches it."""


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """Settings for the training of an arm. The protocol of a cell holds these settings by name."""

    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    """Learning rates of the head to try. Validation chooses one of them."""
    regularisations: tuple[tuple[float, float], ...] = ((0.1, 0.0), (0.4, 0.1))
    """Regularisations to try with each rate: dropout of the model and of its head, and weight decay."""
    users_per_step: int = 32
    """A step holds the examples of about this many users, or of more users if a pass would have too many steps."""
    steps_per_pass: int = 100
    """A pass over all examples has at most this many steps. If there are too many examples, steps become larger."""
    least_steps: int = 20
    """Smallest number of steps between judgements. If half a pass has more steps, a run is judged every half pass."""
    max_points: int = 40
    """Largest number of judgements."""
    patience: int = 4
    """A run ends after this many judgements without improvement."""

    def steps_of_pass(self, num_users: int) -> int:
        """Returns the approximate number of steps in a pass over the examples of `num_users` users."""
        return min(self.steps_per_pass, -(-num_users // self.users_per_step))

    def training(self, steps_per_pass: int, machine: Machine) -> TrainingConfig:
        """Returns settings for the length of a run and for the steps at which the run is judged."""
        every = max(self.least_steps, -(-steps_per_pass // 2))
        return TrainingConfig(
            steps=self.max_points * every,
            checkpoint_every=every,
            validate_every=every,
            validation_steps=UNLIMITED,
            patience=self.patience,
            device=machine.device,
            num_threads=machine.num_threads,
            precision="auto",
            compile="auto",
        )

    @classmethod
    def of(cls, protocol: Mapping[str, Any]) -> FitSettings:
        """Reads the settings from a protocol."""
        names = [field.name for field in dataclasses.fields(cls)]
        chosen = {name: protocol[name] for name in names if name in protocol}
        # JSON turns tuples into lists.
        for name in chosen.keys() & {"learning_rates", "regularisations"}:
            chosen[name] = tuple(tuple(one) if isinstance(one, list) else one for one in chosen[name])
        return cls(**chosen)

    def tried(self) -> list[tuple[float, float, float]]:
        """Returns the settings to try: learning rate, dropout, weight decay."""
        return [(rate, *one) for rate in self.learning_rates for one in self.regularisations]


# ---- the stages ----


def run_pretraining(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Pretrains to the end of the schedule, and saves the parameters in the result, because other cells need them."""
    fit = Fit(work, cell, cell.run_config(), machine)
    fit.train(judge_always=False)
    ranks = fit.ranks_at(fit.last_step())
    trained = load_trained(find_checkpoint(fit.run.path))
    features = {FEATURES: read_json(trained.path / FEATURES)}
    kept = CheckpointStore(fit.run.path / "kept").save(fit.last_step(), trained.tensors, trained.state, features)
    return fit.values() | {"metrics": ranking_metrics(ranks)}, {"ranks": ranks, CHECKPOINT: kept}


def run_transfer(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Trains one arm on a share of the examples (a setting of the protocol), and tests the arm once."""
    started, settings = time.perf_counter(), FitSettings.of(cell.protocol)
    config = arm_config(work, cell)
    source = open_examples(work, cell, config)
    config, steps = _in_steps(config, source, settings, machine)
    best: Trainer | None = None
    stores: list[CheckpointStore] = []
    for rate, dropout, decay in settings.tried():
        run = fit_arm(work, cell, config, source, steps, rate, dropout, decay)
        stores.append(run.store)
        if best is None or run.validation.best_loss < best.validation.best_loss:
            best = run
    assert best is not None
    if best.validation.best_step is None:
        raise DataError(f"every validation loss of {cell.label} was infinite or not a number")
    trained = load_trained(find_checkpoint(best.run.path))
    load_parameters(best.model, stored_parameters(trained), trained.path)
    hashing = config.model.tables
    metrics, arrays = judged(answer(best.model, config.data.steps(source, hashing, config.seed, part="test")))
    for store in stores:  # All runs have ended, so each keeps only its best checkpoint.
        best_name = find_checkpoint(store.folder.parent).name
        for path in [path for path in store.complete() if path.name != best_name]:
            remove_directory(path)
    values = {
        "metrics": metrics,
        "validation_log_loss": round(best.validation.best_loss, 6),
        "learning_rate": best.config.optimizer.dense_learning_rate,
        "dropout": best.config.model.dropout,
        "weight_decay": best.config.optimizer.weight_decay,
        "tries": len(stores),
        "steps": best.validation.best_step,
        "epochs": round(best.validation.best_step / steps.plan.steps_per_epoch, 2),
        "num_examples": len(Examples.of(steps)),
        **facts_of(config.data, source, hashing),
        "device": torch.cuda.get_device_name(best.device) if best.device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    return values, arrays


# ---- an arm ----


def arm_config(work: Work, cell: Cell) -> RunConfig:
    """Returns the config of an arm's run. Later functions set the learning rate and the size of steps."""
    protocol = cell.protocol
    arm, start = str(protocol["arm"]), StartConfig()
    if arm not in ARMS or protocol["vectors"] not in VECTORS:
        raise UsageError(
            f"arm {arm} with vectors {protocol['vectors']} does not exist",
            allowed=f"allowed: {', '.join(ARMS)}; {', '.join(VECTORS)}",
        )
    if arm != "scratch":
        result = work.find(cell.after) if cell.after is not None else None
        if result is None:
            raise DataError(f"{cell.label} begins with a pretrained model, but its pretraining is not finished")
        start = StartConfig(run=str(result.path / CHECKPOINT), prefix="pinfm.")
    return RunConfig(name=arm, data=task_data(work, cell), model=_ranker(cell), start=start, seed=cell.seed)


def _ranker(cell: Cell) -> RankerConfig:
    """Returns the config of a ranker: the model of pretraining with a head."""
    model = cell.run_config().model
    if not isinstance(model, PinFMConfig):
        raise UsageError(f"{type(model).__name__} cannot be transferred", allowed="allowed: PinFMConfig")
    head = HeadConfig(labels=(YES,), reads=cell.protocol["vectors"])
    return RankerConfig.on(model, head)


def task_data(work: Work, cell: Cell) -> RequestConfig:
    """Returns a config that selects the examples. It trains on the protocol's share of the task's training examples,
    and names the examples to judge by."""
    only_new, share = bool(cell.protocol["only_new"]), float(cell.protocol["share"])
    parts: tuple[Literal["train", "judge"], ...] = ("train", "judge")
    train, judge = (task_dataset(work.dataset(cell), part, only_new=only_new) for part in parts)
    num_examples = (
        0 if share == 1.0 else max(1, round(share * read_requests(open_dataset(train, verify=False)).num_rows))
    )
    return RequestConfig(
        dataset=str(train),
        labels=(YES,),
        max_history=cell.run_config().model.max_history,
        judged_on=str(judge),
        validation_share=VALIDATION_USERS,
        test_share=1.0 - VALIDATION_USERS,
        max_requests=num_examples,
        tokens_per_step=UNLIMITED,
        window_buckets=64,
    )


def open_examples(work: Work, cell: Cell, config: RunConfig) -> RequestSource:
    """Opens the training examples. All arms, even `scratch`, use the vocabulary of the pretraining dataset."""
    dataset = open_dataset(work.datasets / str(cell.protocol["pretrained_on"]), verify=False)
    vocabulary = Vocabulary(actions=tuple(dataset.actions), surfaces=tuple(dataset.surfaces))
    source: RequestSource = config.data.open(features_for(config), vocabulary=vocabulary)
    return source


def _in_steps(
    config: RunConfig, source: RequestSource, settings: FitSettings, machine: Machine
) -> tuple[RunConfig, RequestSteps]:
    """Chooses the number of tokens per step. Returns the config with this number, and the training steps."""
    in_one = config.data.steps(source, config.model.tables, config.seed)
    wanted = settings.steps_of_pass(len(np.unique(Examples.of(in_one).users)))
    # A step plan leaves room for the longest request in every step: a full history and one candidate.
    longest = config.model.max_history + 1
    tokens = max(2 * longest, -(-in_one.plan.total_tokens // wanted) + longest)
    data = dataclasses.replace(config.data, tokens_per_step=tokens)
    steps = data.steps(source, config.model.tables, config.seed)
    training = settings.training(steps.plan.steps_per_epoch, machine)
    return dataclasses.replace(config, data=data, training=training), steps


def fit_arm(
    work: Work,
    cell: Cell,
    config: RunConfig,
    source: RequestSource,
    steps: RequestSteps,
    rate: float,
    dropout: float,
    decay: float,
) -> Trainer:
    """Trains an arm until the run ends. `rate` is the learning rate of the head."""
    before, settings = cell.run_config().optimizer, FitSettings.of(cell.protocol)
    optimizer = OptimizerConfig(
        dense_learning_rate=rate,
        # The ratio of the learning rates of tables and dense parameters is the same as in pretraining.
        table_learning_rate=rate * before.table_learning_rate / before.dense_learning_rate,
        warmup_steps=settings.least_steps,
        final_share=1.0,
        weight_decay=decay,
        multipliers=RATES[config.name],
    )
    head = dataclasses.replace(config.model.head, dropout=dropout)
    model = dataclasses.replace(config.model, dropout=dropout, head=head)
    config = dataclasses.replace(config, optimizer=optimizer, model=model)
    run = RunDirectory(work.run(cell) / f"rate-{rate:g}-dropout-{dropout:g}-decay-{decay:g}")
    if not (run.path / "config.json").is_file():
        run.write(config_to_json(config))
    trainer = Trainer(config, run, source, steps=steps)
    trainer.train(quiet=True)
    tried = f"rate {rate:g}, dropout {dropout:g}, decay {decay:g}"
    say(f"{config.name}, {tried}: log-loss {trainer.validation.best_loss:.4f} on validation")
    return trainer


def judged(answers: ScoredCandidates) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Returns metrics on the test examples by name, and arrays by name that hold the same metrics for random resamples
    of the test users."""
    answers = answers.judged(YES)
    logits, labels = answers.scores, answers.labels[YES] == 1
    users = np.unique(answers.users, return_inverse=True)[1].astype(np.int64)
    losses, within = log_losses(logits, labels), auc_of_users(logits, labels, users)
    if np.isnan(within).all():
        raise DataError("no test user has both a yes and a no", allowed="needed: a user with examples of both kinds")
    draws = UserResamples(users, NUM_RESAMPLES)
    over_draws = (draws.auc(logits, labels), draws.mean_of_users(within), draws.mean(losses))
    arrays = {f"draws_{name}": np.asarray(draw, np.float32) for name, draw in zip(METRICS, over_draws, strict=True)}
    return metrics_of(answers, YES), arrays


def facts_of(data: RequestConfig, source: RequestSource, hashing: HashConfig) -> Mapping[str, Any]:
    """Returns the number of examples of each part, the number of test users, and the share of yes in the test."""
    every = dataclasses.replace(data, max_requests=0)
    parts: tuple[Part, ...] = ("train", "validation", "test")
    train, validation, test = (Examples.of(every.steps(source, hashing, 0, part=part)) for part in parts)
    return {
        "num_train": len(train),
        "num_validation": len(validation),
        "num_test": len(test),
        "num_test_users": len(np.unique(test.users)),
        "share_yes": round(float(test.labels.mean()), 4) if len(test) else None,
    }
