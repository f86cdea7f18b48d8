"""The one config of a run, and its way to JSON and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tackboard.core.config import check, from_dict, to_dict
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import DataConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.features.feature_set import FeatureSet, load_features
from tackboard.features.standard import features_for_model
from tackboard.models.description import describe_model, restore_config
from tackboard.models.interface import ModelConfig
from tackboard.train.guard import GuardConfig
from tackboard.train.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train, and how often to write."""

    steps: int = 1000
    """Optimiser steps."""
    checkpoint_every: int = 200
    """Steps between checkpoints; one is also written at the end and on SIGTERM."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    num_threads: int = 0
    """Threads of tensor work; 0 takes the cores this process may use."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto`, which takes the GPU where there is one."""
    precision: str = "fp32"
    """Of the model's arithmetic: `fp32`, or `bf16` for matrix products, parameters staying as they are stored; `auto`
    is bf16 on a GPU, where it is faster, and fp32 on a CPU, where it is not."""

    compile: str = "off"
    """Whether the parts of a model that name themselves (`compiles`: layers, sums of the loss) are compiled: `on`,
    `off`, or `auto`, which does so on a GPU. The first step then takes half a minute; the parts' own results differ in
    rounding, and dropout draws other numbers."""

    def __post_init__(self) -> None:
        check(self.steps >= 1, "training.steps", self.steps, "1 or more")
        check(self.checkpoint_every >= 1, "training.checkpoint_every", self.checkpoint_every, "1 or more")
        check(self.log_every >= 1, "training.log_every", self.log_every, "1 or more")
        check(0 <= self.num_threads <= 1024, "training.num_threads", self.num_threads, "0 to 1024")
        check(self.precision in ("fp32", "bf16", "auto"), "training.precision", self.precision, "fp32, bf16, auto")
        check(self.compile in ("off", "on", "auto"), "training.compile", self.compile, "off, on, auto")
        check(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)), "training.device", self.device, "auto, cpu, cuda"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run's result."""

    name: str
    """Names the run directory."""
    data: DataConfig
    """What it reads."""
    model: Any
    """The model's config: PinFMConfig, or a dataclass of your own (examples/own_model.py)."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """How parameters move."""
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    """What happens on non-finite or spiking values."""
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    """How long, and how often to write."""
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    """How the result is judged."""
    seed: int = 0
    """Decides initial parameters, order of data and dropout."""

    def __post_init__(self) -> None:
        check(-(1 << 63) <= self.seed < 1 << 63, "seed", self.seed, "a whole number of 64 bits")
        check(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name)),
            "name",
            self.name,
            "letters, digits, . _ -",
        )
        if not isinstance(self.model, ModelConfig):
            raise ConfigError(
                f"model is {type(self.model).__name__}",
                allowed="allowed: a frozen dataclass that derives from tackboard.models.interface.ModelConfig",
                fix="see examples/own_model.py",
            )
        if self.model.needs_drawn_negatives and not self.data.uniform_negatives:
            raise ConfigError(
                "data.uniform_negatives = 0, and the model has no other negatives",
                allowed="allowed: 1 or more; the number of items or more takes all of them",
                fix="--set data.uniform_negatives=1024",
            )
        least = self.model.least_max_length
        if self.data.max_length < least:
            raise ConfigError(
                f"data.max_length = {self.data.max_length}",
                allowed=f"allowed: at least {least}: the future-token loss predicts what comes after its anchor",
                fix=f"--set data.max_length={least}, or lower model.loss.future_token_anchor",
            )
        limit = self.model.max_history
        if self.data.max_length > limit:
            raise ConfigError(
                f"data.max_length = {self.data.max_length}",
                allowed=f"allowed: at most model.max_history = {limit}",
                fix=f"--set data.max_length={limit}, or raise model.max_history",
            )


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """A run's config as JSON; `model` becomes the description that `restore_config` reads."""
    return to_dict(config) | {"model": describe_model(config.model)}


def config_from_json(data: dict[str, Any], code_file: Path | None = None) -> RunConfig:
    """The config that `config_to_json` wrote for a run. `code_file` is the file of a user's own model, if named."""
    return with_model(data, restore_config(data["model"], code_file, of_run=True))


def with_model(data: dict[str, Any], model: ModelConfig) -> RunConfig:
    """The config that `config_to_json` wrote for a run, its model's config being read already."""
    return from_dict(RunConfig, data | {"model": model})


def features_for(config: RunConfig) -> Callable[[Vocabulary], FeatureSet]:
    """What the run's model reads, for a vocabulary: of the user's own file of features and the standard ones."""
    own = load_features(config.data.features) if config.data.features else None
    return lambda vocabulary: features_for_model(config.model.reads, vocabulary, config.model.max_history, own)
