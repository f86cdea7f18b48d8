"""What training, evaluation, export and serving ask of a model, and how a model is named and found again.

A model is any `nn.Module` with the methods of `SequenceModel`; no base class is needed. It is made by its config, a
frozen dataclass with a `hashing` field and `build(vocabulary)`. A checkpoint or bundle stores the config and where its
class lives: in this package, or in a file of the user's. Decided: code is never taken from a bundle or a run. A bundle
made with a user's model loads only when the operator names the file with `--code`; a run also where this user's own
`train` recorded the file, outside the run, and the file has not changed since.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.config import from_dict, to_dict
from tackboard.core.errors import ConfigError, DataError, UsageError
from tackboard.core.progress import say
from tackboard.core.trusted_code import check_trusted
from tackboard.core.user_code import load_code, sha256_of_code
from tackboard.events.vocabulary import Vocabulary
from tackboard.features.feature_set import FeatureSet
from tackboard.features.standard import DEFAULT_READS, features_for_model

OWN_PREFIX = "tackboard.models."
REQUIRED_METHODS = ("loss", "encode_users", "encode_items", "score")


class LossOutput(NamedTuple):
    """A step's loss (a scalar to call `backward` on) and figures to log beside it."""

    loss: torch.Tensor
    metrics: dict[str, float]


class SequenceModel(Protocol):
    """The methods a model must have."""

    def loss(self, batch: SequenceBatch) -> LossOutput:
        """The training loss of a batch."""

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """One vector per history [B, D], from all of its events; a history may be empty."""

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        """One vector per item [M, D], from its table rows [M, k]."""

    def score(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores of every item for every user [B, M]; higher is better."""


class ModelConfig(Protocol):
    """The methods and fields a model's config must have."""

    @property
    def hashing(self) -> HashConfig:
        """How item ids become table rows."""

    @property
    def max_history(self) -> int:
        """Events of a history that the model reads, the newest."""

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        """A model with fresh parameters."""

    # It may have `reads`: the features the model reads, such as history.item or the name of a number; and `serving()`,
    # the config of the same model without what only training needs. Modules of a model may say `compiles = True`: see
    # `compile_parts`.


def build_model(config: Any, vocabulary: Vocabulary) -> nn.Module:
    """The model of `config`, checked to have the methods of `SequenceModel`."""
    for name in ("hashing", "max_history", "build"):
        if not hasattr(config, name):
            raise ConfigError(
                f"{type(config).__name__} has no `{name}`",
                allowed="a model config needs hashing, max_history and build(vocabulary)",
                fix="see examples/own_model.py",
            )
    model = config.build(vocabulary)
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(model, name, None))]
    if not isinstance(model, nn.Module) or missing:
        raise ConfigError(
            f"{type(model).__name__} lacks {', '.join(missing) or 'nn.Module as base class'}",
            allowed=f"a model is an nn.Module with {', '.join(REQUIRED_METHODS)}",
            fix="see examples/own_model.py",
        )
    return model


def compile_parts(model: nn.Module) -> None:
    """Has torch compile the modules of a model that say `compiles`, when they are first called, for any lengths.

    Parts and not the whole: what a batch decides (which tokens predict, how long rows are) stays in plain Python, and
    layers of the same kind are compiled once.
    """
    for module in model.modules():
        if getattr(module, "compiles", False):
            module.compile(dynamic=True)


def features_of(config: Any, vocabulary: Vocabulary, own: FeatureSet | None = None) -> FeatureSet:
    """What a model of `config` reads: its `reads`, or the standard columns where it does not say."""
    return features_for_model(getattr(config, "reads", DEFAULT_READS), vocabulary, config.max_history, own)


def describe_model(config: Any) -> dict[str, Any]:
    """A model config as JSON: its class, its values and, for a user's file, the SHA-256 of that file."""
    cls = type(config)
    description = {"config_class": f"{cls.__module__}:{cls.__qualname__}", "config": to_dict(config)}
    if not cls.__module__.startswith(OWN_PREFIX):
        module = sys.modules[cls.__module__]
        source = Path(str(module.__file__))
        description["config_class"] = f"{source.name}:{cls.__qualname__}"
        description["code_file"] = str(source.resolve())
        description["code_sha256"] = sha256_of_code(module)
    return description


def restore_config(description: dict[str, Any], code_file: Path | None = None, *, of_run: bool = False) -> Any:
    """The config object that `describe_model` described.

    A class outside this package is taken from `code_file`, which the operator named. Without it, the description of a
    run (`of_run`) stands for the file it names, where this user's own training recorded that file and its SHA-256, and
    the file still has it. Everything else is a UsageError that says what to type, and nothing was run.
    """
    try:
        place, _, name = str(description["config_class"]).partition(":")
        values = description["config"]
    except (KeyError, TypeError):
        raise DataError("the model description lacks config_class or config") from None
    if place.startswith(OWN_PREFIX):
        module: ModuleType = _own_module(place)
    elif code_file is not None:
        module = load_code(code_file)
        if sha256_of_code(module) != description.get("code_sha256"):
            say(f"warning: {code_file} is not the file this model was trained with; its scores may differ")
    elif of_run and "code_file" in description:
        recorded, sha256 = Path(str(description["code_file"])), str(description.get("code_sha256"))
        check_trusted(recorded, sha256)
        module = load_code(recorded, sha256)
    else:
        raise UsageError(
            f"this model's code lives in a user's file, {place}",
            allowed="code is never taken from a bundle",
            fix=f"name the file: --code {place}",
        )
    cls = getattr(module, name, None)
    if not dataclasses.is_dataclass(cls):
        raise DataError(f"{place} has no config class {name}", fix="use the file this model was trained with")
    return from_dict(cls, values, "model")  # type: ignore[arg-type]


def _own_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        raise DataError(f"there is no model module {place}", fix="use a newer tackboard") from None
