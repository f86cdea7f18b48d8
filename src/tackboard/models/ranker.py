"""A small ranker: a PinFM and a head that answers one question about a request and each of its candidates.

In: requests with candidates, and their labels. Out: a loss, or the log odds of a yes for each candidate.

    history    ─ pinfm ─►  user vector u ┐
                                         ├─ [u, z, u∘z] ─ MLP ─►  log odds
    candidate  ─ pinfm ─►  item vector z ┘

A history is encoded once, however many candidates a request has. With `start.run` and `start.prefix=pinfm.` the model
begins as pretrained; `optimizer.multipliers={"pinfm.": 0.1}` lets that part move at a tenth of the head's rates, 0
freezes it. The head may also read what the two vectors are made of (`head.reads = hidden`).

Shapes: U requests, C candidates, D width, E width of an item's rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import RequestBatch
from tackboard.batch.batches import Batch
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.interface import LossOutput
from tackboard.models.pinfm import PinFM, PinFMConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What the head reads and predicts."""

    label: str = ""
    """The action whose label is predicted; empty where the data has one label only."""
    reads: Literal["outputs", "hidden"] = "outputs"
    """`outputs`: the unit vectors that PinFM compares; `hidden`: also the vectors that they are made of."""
    dropout: float = 0.1
    """Share of the hidden layer dropped in training, 0 to below 1."""

    def __post_init__(self) -> None:
        check(self.reads in ("outputs", "hidden"), "model.head.reads", self.reads, "outputs, hidden")
        check(0.0 <= self.dropout < 1.0, "model.head.dropout", self.dropout, "0 to below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(PinFMConfig):
    """The settings of a PinFM and of the head on it. The losses of pretraining have no effect."""

    batch_type: ClassVar[type[Batch]] = RequestBatch

    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    """The head."""

    @classmethod
    def on(cls, pinfm: PinFMConfig, head: HeadConfig) -> RankerConfig:
        """A head on a model of these settings, so that it can start from a run of that model."""
        return cls(**{field.name: getattr(pinfm, field.name) for field in dataclasses.fields(pinfm)}, head=head)

    @property
    def needs_drawn_negatives(self) -> bool:
        """No: the ranker learns from items that were shown and not chosen."""
        return False

    def build(self, vocabulary: Vocabulary) -> Ranker:  # type: ignore[override]
        return Ranker(self, vocabulary)


class Ranker(nn.Module):
    """See the module's docstring."""

    def __init__(self, config: RankerConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.pinfm = PinFM(config, vocabulary)
        self.head = RankingHead(config.head, config.width, self.pinfm.item_tables.width)

    def loss(self, batch: RequestBatch) -> LossOutput:
        """The mean log-loss of the candidates whose label is known, each with its weight."""
        label = self._label(batch)
        weights_C = batch.weights * batch.known[label]
        losses_C = functional.binary_cross_entropy_with_logits(
            self.scores(batch).float(), batch.labels[label], reduction="none"
        )
        weight = weights_C.sum()
        return LossOutput((losses_C * weights_C).sum() / weight.clamp_min(1e-9), {}, weight)

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """The log odds of a yes [C]."""
        hidden_UD, users_UD = self.pinfm.encode_requests(batch.histories)
        rows_CE = self.pinfm.item_tables(batch.candidate_rows())
        items_CD = self.pinfm.project_items(rows_CE)
        answer: torch.Tensor = self.head(batch.expand(users_UD), items_CD, batch.expand(hidden_UD), rows_CE)
        return answer

    def _label(self, batch: RequestBatch) -> str:
        wanted, known = self.config.head.label, sorted(batch.labels)
        if wanted in known or (not wanted and len(known) == 1):
            return wanted or known[0]
        raise ConfigError(
            f"model.head.label = {wanted!r} is not a label of the data",
            allowed=f"allowed: {', '.join(known) or 'none, the data has no labels'}",
            fix="name a label: --set model.head.label=NAME",
        )


class RankingHead(nn.Module):
    """An MLP over two unit vectors and their product, and with `hidden` over the vectors that they are made of."""

    def __init__(self, config: HeadConfig, width: int, item_width: int) -> None:
        super().__init__()
        self.reads_hidden = config.reads == "hidden"
        self.norms = nn.ModuleList([nn.LayerNorm(size) for size in ((width, item_width) if self.reads_hidden else ())])
        num_read = 3 * width + (width + item_width if self.reads_hidden else 0)
        self.mlp = nn.Sequential(
            nn.Linear(num_read, 2 * width), nn.GELU(), nn.Dropout(config.dropout), nn.Linear(2 * width, 1)
        )

    def forward(
        self, users_CD: torch.Tensor, items_CD: torch.Tensor, hidden_CD: torch.Tensor, rows_CE: torch.Tensor
    ) -> torch.Tensor:
        """Log odds [C]."""
        scale = math.sqrt(users_CD.shape[1])
        # Entries of unit vectors are about 1/√D; the scale brings them and their products to about 1.
        parts = [users_CD * scale, items_CD * scale, users_CD * items_CD * scale**2]
        if self.reads_hidden:
            parts += [norm(part) for norm, part in zip(self.norms, (hidden_CD, rows_CE), strict=True)]
        answer: torch.Tensor = self.mlp(torch.cat(parts, dim=1)).squeeze(1)
        return answer
