"""Your own model in one file: a config, the three methods that training and serving call, and a recipe.

    tackboard data synth                                # or `tackboard init` and --set data.dataset=datasets/NAME
    tackboard train examples/own_model.py:recipe
    tackboard export runs/latest --out own-bundle
    tackboard serve own-bundle --code examples/own_model.py

A user's vector is the sum of the vectors of their events, with more weight on newer events. On short histories, this
simple model is hard to beat.
"""

import dataclasses

import torch
from torch import nn
from torch.nn.functional import embedding, normalize

from tackboard.batch import SequenceBatch
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import DataConfig
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel
from tackboard.models.losses import next_item_loss, row_of_event
from tackboard.models.tables import HashedTables, TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayedSumConfig(ModelConfig):
    """The settings that `--set model.NAME=…` can change."""

    tables: TableConfig = dataclasses.field(default_factory=lambda: TableConfig(num_hashes=2, num_rows=2048, dim=32))
    max_history: int = 32

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        return DecayedSum(self, vocabulary)


class DecayedSum(RetrievalModel):
    """The a-th newest event weighs sigmoid(decay) ** a. The base class scores items by dot products with the user."""

    def __init__(self, config: DecayedSumConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.tables = HashedTables(config.tables)  # the optimiser finds tables by this class
        self.actions = nn.Embedding(vocabulary.num_actions, self.tables.width)
        self.start = nn.Parameter(torch.randn(self.tables.width) * 0.1)  # the vector of an empty history
        self.decay = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("scale", torch.tensor(10.0))

    def loss(self, batch: SequenceBatch) -> LossOutput:
        rows, events = row_of_event(batch), torch.arange(batch.num_events, device=batch.items.device)
        before = (rows[:, None] == rows) & (events[:, None] > events)  # [N, N]: event j came before event i
        users = self._sum(before, events[:, None] - events, batch)[batch.is_positive]
        items = self.encode_items(batch.item_rows)
        loss = next_item_loss(users, items, batch, self.scale, correct_popularity=True, mask_same_user=True)
        return LossOutput(loss, {"decay": torch.sigmoid(self.decay).item()})

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        rows, events = row_of_event(batch), torch.arange(batch.num_events, device=batch.items.device)
        inside = torch.arange(batch.num_rows, device=rows.device)[:, None] == rows  # [B, N]
        return self._sum(inside, batch.offsets[1:, None] - events, batch)

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        return normalize(self.tables(item_rows), dim=-1)

    def _sum(self, mask: torch.Tensor, age: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
        weights = torch.where(mask, torch.sigmoid(self.decay) ** age.clamp(0, 64), 0.0)
        events = embedding(batch.items, self.tables(batch.item_rows)) + self.actions(batch.actions)
        return normalize(weights @ events + self.start, dim=-1)


def recipe() -> RunConfig:
    """Returns the config of the run; `--set data.dataset=…` selects your events."""
    data = DataConfig(dataset="datasets/demo", max_length=32, tokens_per_step=1024)
    return RunConfig(name="own-model", data=data, model=DecayedSumConfig(), training=TrainingConfig(steps=300))
