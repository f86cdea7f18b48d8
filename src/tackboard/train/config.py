"""Defines the config of a run, and converts it to JSON and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tackboard.batch import RequestBatch
from tackboard.core.config import check, from_dict, to_dict
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import StepsConfig
from tackboard.data.loader import DataConfig
from tackboard.data.request_loader import RequestConfig
from tackboard.data.stream import StreamConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.features.feature_set import FeatureSet, load_features
from tackboard.features.standard import features_for_model
from tackboard.models.description import describe_model, restore_config
from tackboard.models.interface import ModelConfig
from tackboard.parallel.config import ParallelConfig
from tackboard.train.guard import GuardConfig
from tackboard.train.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The length of training, the intervals at which files are written, and the device."""

    steps: int = 1000
    """Number of optimiser steps."""
    checkpoint_every: int = 200
    """Steps between checkpoints. A checkpoint is also written at the start, at the end, and on SIGTERM or SIGINT."""
    validate_every: int = 0
    """Steps between judgements. A judgement computes the loss on the users of data.validation_share, or on the slice of
    data.validation_hours, and writes a checkpoint. The best checkpoint is kept, and `evaluate` and `export` use it. 0
    means no judgements."""
    validation_steps: int = 100
    """Largest number of steps of held-out data that a judgement reads. Every judgement reads the same steps."""
    patience: int = 0
    """Training ends after this many judgements in a row without a better loss. With 0, training never ends early."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    num_threads: int = 0
    """Number of threads for tensor work; 0 takes all cores that this process may use. Beside a GPU, and in each of
    several processes, 0 means one thread."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto`, which takes the GPU if there is one."""
    precision: str = "fp32"
    """Precision of the arithmetic. `fp32` applies to all arithmetic. `bf16` applies to matrix products; parameters keep
    their own precision. `auto` means bf16 on a GPU, where bf16 is faster, and fp32 on a CPU."""

    compile: str = "off"
    """Whether to compile the modules whose attribute `compiles` is True, such as layers: `on`, `off`, or `auto`, which
    compiles on a GPU only. The first step then takes half a minute. Results of compiled parts differ in rounding, and
    dropout draws other numbers."""
    pad_shapes: str = "auto"
    """Whether to pad batches to sizes that repeat from step to step: `on`, `off`, or `auto`, which pads if the model
    can pad and is compiled on a GPU. Padding changes no result except rounding and the numbers that dropout draws."""
    cuda_graphs: str = "auto"
    """Whether to record a step of each shape as a CUDA graph and replay it: `on`, `off`, or `auto`, which replays if
    batches are padded on a GPU and the model allows replay. A replayed step gives the same results, bit for bit."""

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "validation_steps", "log_every"):
            check(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "1 or more")
        for name in ("validate_every", "patience"):
            check(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "0 or more")
        if self.patience and not self.validate_every:
            raise ConfigError(
                f"training.patience is {self.patience}, but the run is never judged",
                allowed="allowed: 0, or any number together with training.validate_every",
                fix="--set training.validate_every=100",
            )
        check(0 <= self.num_threads <= 1024, "training.num_threads", self.num_threads, "0 to 1024")
        check(self.precision in ("fp32", "bf16", "auto"), "training.precision", self.precision, "fp32, bf16, auto")
        for name in ("compile", "pad_shapes", "cuda_graphs"):
            check(
                getattr(self, name) in ("off", "on", "auto"), f"training.{name}", getattr(self, name), "off, on, auto"
            )
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        check(is_device, "training.device", self.device, "auto, cpu, cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Parameters of another run that a model begins with, instead of random parameters."""

    run: str = ""
    """Run, checkpoint or bundle (made by `tackboard export --for-training`) whose parameters are taken by name. If
    empty, all parameters are random. `tackboard train --from` sets it."""
    prefix: str = ""
    """Only parameters whose names begin with this prefix get values from the other run. Use `pinfm.` if this model
    contains the other run's model as `pinfm`. The other run must have all of these parameters, under names without
    the prefix. If empty, the whole model gets values, or the one part of it that fits the other run, such as the
    `pinfm` of a ranker."""
    is_continued: bool = False
    """Whether the run goes on with the model of `run` on newer data: names and tables may grow, tables keep their
    Adagrad sums, and only new events are predicted. `tackboard train --continue` sets it."""
    needs_run: bool = False
    """Whether the run stops at once if `run` is empty. Recipes that fine-tune a pretrained model set it, because a
    model that begins at random by mistake would train without an error."""

    def __post_init__(self) -> None:
        if self.is_continued and (not self.run or self.prefix):
            what = f"start.prefix is {self.prefix}" if self.prefix else "start.run is empty"
            raise ConfigError(
                f"start.is_continued is true, but {what}",
                allowed="a run goes on with the whole model of one other run",
                fix="--set start.prefix=" if self.prefix else "add --continue RUN: ls runs/",
            )


DATA_CONFIGS: dict[str, type[StepsConfig]] = {cls.kind: cls for cls in (DataConfig, RequestConfig, StreamConfig)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run's result."""

    name: str
    """Name of the run; it is part of the name of the run's directory."""
    data: Any
    """The data of the run: DataConfig for segments of histories, RequestConfig for labelled requests, StreamConfig for
    histories made on the fly."""
    model: Any
    """The model's config: PinFMConfig, or a dataclass of your own (examples/own_model.py)."""
    start: StartConfig = dataclasses.field(default_factory=StartConfig)
    """The parameters that the model begins with."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimisers and their learning rates."""
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    """The handling of losses and gradients that are not finite, and of gradients that spike."""
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    """The length of training, the intervals at which files are written, and the device."""
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    """The evaluation of the trained model."""
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    """Training in several processes: the division of tables, and what goes over the wire."""
    seed: int = 0
    """Seed that decides the initial parameters, the order of the data and dropout."""

    def __post_init__(self) -> None:
        check(-(1 << 63) <= self.seed < 1 << 63, "seed", self.seed, "a whole number of 64 bits")
        is_name = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name) is not None
        check(is_name, "name", self.name, "letters, digits, . _ -")
        if not isinstance(self.data, StepsConfig):
            names = ", ".join(cls.__name__ for cls in DATA_CONFIGS.values())
            raise ConfigError(f"data is {type(self.data).__name__}", allowed=f"allowed: {names}")
        if not isinstance(self.model, ModelConfig):
            raise ConfigError(
                f"model is {type(self.model).__name__}",
                allowed="allowed: a frozen dataclass that derives from tackboard.models.interface.ModelConfig",
                fix="see examples/own_model.py",
            )
        if self.data.batch_type is not self.model.batch_type:
            raise ConfigError(
                f"{type(self.data).__name__} gives a {self.data.batch_type.__name__}, but the model "
                f"{type(self.model).__name__} reads a {self.model.batch_type.__name__}",
                allowed="allowed: DataConfig or StreamConfig for a SequenceBatch, RequestConfig for a RequestBatch",
                fix="give the recipe the other data config, or another model",
            )
        if isinstance(self.data, DataConfig | StreamConfig):
            _check_segments(self.data, self.model)
        elif isinstance(self.data, RequestConfig) and self.data.max_history != self.model.max_history:
            raise ConfigError(
                f"data.max_history is {self.data.max_history}, but the model reads {self.model.max_history} events",
                allowed=f"allowed: {self.model.max_history}, as model.max_history",
                fix=f"--set data.max_history={self.model.max_history}",
            )
        held_out = self.data.validation_share or getattr(self.data, "validation_hours", 0.0)
        if self.training.validate_every and not held_out:
            raise ConfigError(
                f"training.validate_every is {self.training.validate_every}, but nothing is held out for it",
                allowed="allowed: 0, or any number with data.validation_share or data.validation_hours above 0",
                fix="--set data.validation_share=0.05",
            )

    def warnings(self) -> list[str]:
        """Returns warnings about settings that are allowed but probably a mistake."""
        has_length = isinstance(self.data, DataConfig | StreamConfig)
        return self.model.warnings(self.data.max_length) if has_length else []


def _check_segments(data: DataConfig | StreamConfig, model: ModelConfig) -> None:
    """Raises ConfigError if segments of this config leave the model without negatives, targets or positions."""
    setting = "data.law.max_events" if isinstance(data, StreamConfig) else "data.max_length"
    if model.needs_drawn_negatives and not data.uniform_negatives:
        raise ConfigError(
            "data.uniform_negatives is 0, but the model needs drawn negatives",
            allowed="allowed: 1 or more; if the value is at least the number of items, all items are drawn",
            fix="--set data.uniform_negatives=1024",
        )
    if data.max_length < model.least_max_length:
        least = model.least_max_length
        raise ConfigError(
            f"{setting} = {data.max_length} is too short",
            allowed=f"allowed: at least {least}, because the future-token loss predicts events after its anchor",
            fix=f"--set {setting}={least}, or lower model.loss.future_token_anchor",
        )
    if data.max_length > model.max_history:
        limit = model.max_history
        raise ConfigError(
            f"{setting} = {data.max_length} is too long",
            allowed=f"allowed: at most model.max_history = {limit}",
            fix=f"--set {setting}={limit}, or raise model.max_history",
        )


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """Returns a run's config as JSON; `model` becomes the description that `restore_config` reads."""
    data = {"kind": config.data.kind, **to_dict(config.data)}
    return to_dict(config) | {"data": data, "model": describe_model(config.model)}


def config_from_json(data: dict[str, Any], code_file: Path | None = None) -> RunConfig:
    """Reads the config that `config_to_json` wrote. `code_file` is the file of a user's own model, or None."""
    return with_model(data, restore_config(data["model"], code_file, of_run=True))


def with_model(data: dict[str, Any], model: ModelConfig) -> RunConfig:
    """Reads the config that `config_to_json` wrote, except its model; `model` is used instead."""
    return from_dict(RunConfig, data | {"data": _read_data(data), "model": model})


def _read_data(data: dict[str, Any]) -> StepsConfig:
    """Reads the data config of a run. Configs of older versions have no `kind`; their data is always segments."""
    settings = data.get("data")
    kind = settings.get("kind", DataConfig.kind) if isinstance(settings, dict) else DataConfig.kind
    if kind not in DATA_CONFIGS:
        raise ConfigError(f"data.kind = {kind!r} is not known", allowed=f"allowed: {', '.join(DATA_CONFIGS)}")
    rest = {key: value for key, value in settings.items() if key != "kind"} if isinstance(settings, dict) else settings
    return from_dict(DATA_CONFIGS[kind], rest, "data")


def features_for(config: RunConfig) -> Callable[[Vocabulary], FeatureSet]:
    """Returns a function from a vocabulary to the features that the model reads: standard and user-defined features."""
    own = load_features(config.data.features) if config.data.features else None
    model = config.model
    of_requests = model.batch_type is RequestBatch
    return lambda names: features_for_model(
        model.reads, names, model.max_history, own, of_requests=of_requests, anchor_stride=model.anchor_stride
    )
