"""A model of your own: an nn.Module, its config and a recipe, in one file.

    tackboard train examples/own_model.py:recipe --set data.dataset=datasets/mine
    tackboard export runs/latest --out bundle
    tackboard serve bundle --code examples/own_model.py

The model averages a history's item vectors with newer events weighing more, a baseline that is hard to beat on short
histories. Training, export and serving ask of it the four methods below and nothing else.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.data.loader import DataConfig
from tackboard.events.vocabulary import Vocabulary
from tackboard.models.interface import LossOutput
from tackboard.models.losses import next_item_loss, row_of_event
from tackboard.models.tables import HashedTables
from tackboard.train.config import RunConfig, TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayedMeanConfig:
    """Sizes of the model."""

    hashing: HashConfig = dataclasses.field(default_factory=lambda: HashConfig(num_hashes=2, num_rows=2048))
    """How item ids become table rows."""
    width: int = 32
    """Width of one sub-table's row; vectors are twice as wide."""
    max_history: int = 32
    """Events of a history that count, the newest."""

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        """A fresh model."""
        return DecayedMean(self, vocabulary)


class DecayedMean(nn.Module):
    """User = learned-decay mean of item vectors + an offset per action; score = product with the item's vector."""

    def __init__(self, config: DecayedMeanConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.tables = HashedTables(config.hashing, config.width)
        self.actions = nn.Embedding(vocabulary.num_actions, self.tables.width)
        self.start = nn.Parameter(torch.randn(self.tables.width) * 0.1)
        self.decay = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: SequenceBatch) -> LossOutput:
        rows, events = row_of_event(batch), torch.arange(batch.num_events, device=batch.items.device)
        before = (rows[:, None] == rows) & (events[:, None] > events)
        items = self.tables(batch.item_rows)
        users = self._mean(before, events[:, None] - events, batch, items)[batch.is_positive]
        scale = torch.tensor(10.0)
        loss = next_item_loss(
            users, functional.normalize(items, dim=-1), batch, scale, correct_popularity=True, mask_same_user=True
        )
        return LossOutput(loss, {"decay": float(torch.sigmoid(self.decay.detach()))})

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        rows, events = row_of_event(batch), torch.arange(batch.num_events, device=batch.items.device)
        inside = torch.arange(batch.num_rows, device=batch.items.device)[:, None] == rows
        return self._mean(inside, batch.offsets[1:, None] - events, batch, self.tables(batch.item_rows))

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.tables(item_rows), dim=-1)

    def score(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return 10.0 * users @ items.T

    def _mean(self, mask: torch.Tensor, age: torch.Tensor, batch: SequenceBatch, items: torch.Tensor) -> torch.Tensor:
        weights = torch.where(mask, torch.sigmoid(self.decay) ** age.clamp(0, 64), torch.zeros(()))
        events = functional.embedding(batch.items, items) + self.actions(batch.actions)
        return functional.normalize(weights @ events + self.start, dim=-1)


def recipe() -> RunConfig:
    """The run: `--set data.dataset=…` points it at your events."""
    return RunConfig(
        name="own-model",
        data=DataConfig(dataset="datasets/demo", max_length=32, tokens_per_step=1024),
        model=DecayedMeanConfig(),
        training=TrainingConfig(steps=300, checkpoint_every=100),
    )
