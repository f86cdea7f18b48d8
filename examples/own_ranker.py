"""Your own ranker in one file: a config, the two methods that training and serving call, and a recipe.

    tackboard data synth                                # or `tackboard init` and --set data.dataset=datasets/NAME
    tackboard data label datasets/demo --label click=1h
    tackboard train examples/own_ranker.py:recipe
    tackboard evaluate runs/latest
    tackboard export runs/latest --out ranker-bundle
    tackboard serve ranker-bundle --code examples/own_ranker.py

The model reads a request's history once. The mean of the vectors of its events is called the user's taste. Each
candidate is compared with the taste, and the score is the log odds of a click.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from tackboard.batch import RequestBatch
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.request_loader import RequestConfig
from tackboard.models.interface import LossOutput, ModelConfig
from tackboard.models.tables import HashedTables, TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasteConfig(ModelConfig):
    """The settings that `--set model.NAME=…` can change."""

    batch_type: ClassVar = RequestBatch  # `loss` reads requests, not segments of histories
    tables: TableConfig = dataclasses.field(default_factory=lambda: TableConfig(num_hashes=2, num_rows=2048, dim=32))
    max_history: int = 32
    label: str = "click"

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        return Taste(self, vocabulary)


class Taste(nn.Module):
    """Computes the log odds with an MLP of the taste, the candidate and the product of both."""

    def __init__(self, config: TasteConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.label = config.label
        self.tables = HashedTables(config.tables)  # the optimiser finds tables by this class
        width = self.tables.width
        self.actions = nn.Embedding(vocabulary.num_actions, width)
        self.mlp = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss(self, batch: RequestBatch) -> LossOutput:
        weights = batch.weights * batch.known[self.label]  # unknown labels get the weight 0
        losses = binary_cross_entropy_with_logits(self.scores(batch), batch.labels[self.label], reduction="none")
        return LossOutput((losses * weights).sum() / weights.sum().clamp_min(1.0), {}, weights.sum())

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        histories = batch.histories
        items = self.tables(histories.item_rows)  # every distinct item of histories and candidates, once
        events = embedding(histories.items, items) + self.actions(histories.actions)
        lengths = histories.lengths()
        rows = torch.repeat_interleave(torch.arange(batch.num_requests, device=lengths.device), lengths)
        sums = torch.zeros(batch.num_requests, events.shape[1], device=events.device).index_add(0, rows, events)
        tastes = batch.expand(sums / lengths.clamp_min(1)[:, None])  # the taste of each candidate's request
        candidates = embedding(batch.candidates, items)
        return self.mlp(torch.cat([tastes, candidates, tastes * candidates], dim=1)).squeeze(1)


def recipe() -> RunConfig:
    """Returns the config. A tenth of the users serves for validation, another tenth for `tackboard evaluate`."""
    data = RequestConfig(dataset="datasets/demo", labels=("click",), max_history=32, tokens_per_step=8192)
    training = TrainingConfig(steps=300, checkpoint_every=100, validate_every=100, validation_steps=20, patience=2)
    return RunConfig(name="own-ranker", data=data, model=TasteConfig(), training=training)
