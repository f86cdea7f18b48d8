"""Defines the methods of a model that training, scoring and retrieval call, and the config that makes a model.

A model is an `nn.Module` made by its config, a frozen dataclass that derives from `ModelConfig`. The model has:

    loss(batch)              for training; `batch_type` of the config says if a batch holds histories or requests
    scores(RequestBatch)     for evaluation of rankers, offline scoring and the server; one request or thousands
    encode_users(SequenceBatch), encode_items(rows)
                             only for retrieval: the product of both vectors ranks all items for a user

A model may also have `prepare(batch, generator)`. It returns the batch with further tensors that do not depend on the
parameters, such as PinFM's targets. The trainer calls it on the CPU before the batch is copied to the device. So the
host never waits until a GPU knows the length of a tensor. The seed of `generator` depends only on the run's seed and
the step number. `loss` must also work on a batch that did not go through `prepare`. If the model has `can_pad = True`,
its `prepare` also takes the keyword `pad`. If `pad` is true, `prepare` pads the tensors to sizes that repeat, and the
loss stays the same. If the model also has `can_replay = True`, a step with a padded batch may be recorded as a CUDA
graph. The model thereby promises that all numbers that differ from step to step are in tensors.

A model that can retrieve derives from `RetrievalModel` and inherits `scores`. For modules with `compiles = True` see
`compile_parts`.

Shapes: U requests, C candidates, B rows, M items, D width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from tackboard.batch import RequestBatch, SequenceBatch
from tackboard.batch.batches import Batch
from tackboard.core.config import from_dict, move_settings
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import DEFAULT_READS, Vocabulary
from tackboard.models.tables import TableConfig
from tackboard.ops.packed_attention_reference import keep_groups_out_of_compilation

REQUIRED_METHODS = ("loss", "scores")
RETRIEVAL_METHODS = ("encode_users", "encode_items")


class LossOutput(NamedTuple):
    """The loss of a step (a scalar on which `backward` is called) and figures to log.

    The loss is a mean over examples. The scalar `weight` is their total weight; None means `batch.num_examples()`.
    """

    loss: torch.Tensor
    metrics: dict[str, float | torch.Tensor]
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """The settings of a model. Derive from this class, add fields and define `build`; other methods have defaults."""

    batch_type: ClassVar[type[Batch]] = SequenceBatch
    """The batch that `loss` reads."""
    moved_settings: ClassVar[Mapping[str, str]] = {"hashing": "tables"}
    """New names for settings of older versions, such as `table_dim` → `tables.dim`."""

    tables: TableConfig = dataclasses.field(default_factory=TableConfig)
    """The tables of items, and how item ids become rows of these tables."""
    max_history: int = 64
    """Largest number of events of a history that the model reads. Longer histories are cut to their newest events."""

    @classmethod
    def from_stored(cls, values: Any) -> Self:
        """Reads the config from JSON of this or an older version; missing settings get defaults."""
        return from_dict(cls, move_settings(values, cls.moved_settings), "model")

    @abc.abstractmethod
    def build(self, vocabulary: Vocabulary) -> nn.Module:
        """Makes a model with fresh parameters."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The features that the model reads, such as `history.item` or the name of a numeric feature."""
        return DEFAULT_READS

    @property
    def anchor_stride(self) -> int:
        """The stride with which `Events.anchored` chooses histories; 1 means that a history has the newest events."""
        return 1

    @property
    def needs_drawn_negatives(self) -> bool:
        """Whether the loss needs drawn items as negatives. If so, training refuses data.uniform_negatives = 0."""
        return False

    @property
    def least_max_length(self) -> int:
        """The smallest data.max_length with which every loss finds something to predict."""
        return 2

    @property
    def meaning_of_scores(self) -> str:
        """A sentence for the card of a bundle: what a score says, and what it does not say."""
        return (
            "Scores rank the candidates of one request. Whether they mean more than that depends on the model's code; "
            "they are not comparable between versions."
        )

    def check_labels(self, known: Sequence[str]) -> None:
        """Raises ConfigError if the model needs a label that is not in `known`, the labels that the requests have."""
        del known

    def warnings(self, max_length: int) -> list[str]:
        """Returns warnings about settings that are probably wrong for segments of up to `max_length` events."""
        del max_length
        return []

    def serving(self) -> Self:
        """Returns the config of the same model without the parts that only training needs."""
        return self


class RetrievalModel(nn.Module, abc.ABC):
    """A model that ranks by the product of a user's vector and an item's vector."""

    @abc.abstractmethod
    def loss(self, batch: Any) -> LossOutput:
        """Returns the training loss of a batch."""

    @abc.abstractmethod
    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """Returns one vector per history [B, D], from all of its events. A history may be empty."""

    @abc.abstractmethod
    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        """Returns one vector per item [M, D], from its table rows [M, k]."""

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns one score per candidate [C]; higher is better."""
        users_UD = self.encode_users(batch.histories)
        items_CD = self.encode_items(batch.candidate_rows())
        if batch.num_requests == 1:
            return items_CD @ users_UD[0]
        return (batch.expand(users_UD) * items_CD).sum(dim=-1)


def can_retrieve(model: nn.Module) -> bool:
    """Returns whether a model can compute vectors of users and items."""
    return all(callable(getattr(model, name, None)) for name in RETRIEVAL_METHODS)


def build_model(config: ModelConfig, vocabulary: Vocabulary) -> nn.Module:
    """Makes the model of `config`. Raises ConfigError if the model lacks a required method."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"{type(config).__name__} is not the config of a model",
            allowed="allowed: a frozen dataclass that derives from tackboard.models.interface.ModelConfig",
            fix="see examples/own_model.py",
        )
    model = config.build(vocabulary)
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(model, name, None))]
    if not isinstance(model, nn.Module) or missing:
        raise ConfigError(
            f"{type(model).__name__} lacks {', '.join(missing) or 'nn.Module as base class'}",
            allowed=f"a model is an nn.Module with {' and '.join(REQUIRED_METHODS)}; a model with "
            f"{' and '.join(RETRIEVAL_METHODS)} gets its scores from RetrievalModel",
            fix="see examples/own_model.py",
        )
    return model


def compile_parts(model: nn.Module) -> None:
    """Lets torch compile the modules with `compiles = True` at their first call, once for all lengths.

    Only parts are compiled, because decisions that depend on a batch (which tokens predict, the lengths of rows) stay
    in plain Python, and because layers of the same kind then need only one compilation.
    """
    keep_groups_out_of_compilation()
    for module in model.modules():
        if getattr(module, "compiles", False):
            module.compile(dynamic=True)
