"""Defines a small ranker: a PinFM with a head that predicts one label for each candidate of a request.

The ranker takes requests with candidates and labels. It returns a loss, or the log odds that a candidate's label is 1.

    history    ─ pinfm ─►  user vector u ┐
                                         ├─ [u, z, u∘z] ─ MLP ─►  log odds
    candidate  ─ pinfm ─►  item vector z ┘

The history of a request is encoded once for all of its candidates. With `start.run` and `start.prefix=pinfm.` the PinFM
starts from the parameters of a pretraining run. `optimizer.multipliers={"pinfm.": 0.1}` gives the PinFM a tenth of the
head's learning rates; 0 freezes the PinFM. With `head.reads = hidden` the head also reads the vectors from which u and
z are computed.

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
    """The input and the label of the head."""

    label: str = ""
    """The action whose label is predicted. The setting may be empty if the data has only one label."""
    reads: Literal["outputs", "hidden"] = "outputs"
    """`outputs`: the unit vectors that PinFM compares. `hidden`: also the vectors from which they are computed."""
    dropout: float = 0.1
    """Share of the hidden layer that training drops, 0 to below 1."""

    def __post_init__(self) -> None:
        check(self.reads in ("outputs", "hidden"), "model.head.reads", self.reads, "outputs, hidden")
        check(0.0 <= self.dropout < 1.0, "model.head.dropout", self.dropout, "0 to below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(PinFMConfig):
    """The settings of a PinFM and of its head. The settings of the pretraining losses have no effect."""

    batch_type: ClassVar[type[Batch]] = RequestBatch

    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    """The settings of the head."""

    @classmethod
    def on(cls, pinfm: PinFMConfig, head: HeadConfig) -> RankerConfig:
        """Adds a head to the settings of a PinFM, so that the ranker can start from a run with these settings."""
        return cls(**{field.name: getattr(pinfm, field.name) for field in dataclasses.fields(pinfm)}, head=head)

    @property
    def needs_drawn_negatives(self) -> bool:
        """Always False: the ranker learns from items that were shown and not chosen."""
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
        """Returns the weighted mean log-loss of the candidates whose label is known."""
        label = self._label(batch)
        weights_C = batch.weights * batch.known[label]
        losses_C = functional.binary_cross_entropy_with_logits(
            self.scores(batch).float(), batch.labels[label], reduction="none"
        )
        weight = weights_C.sum()
        return LossOutput((losses_C * weights_C).sum() / weight.clamp_min(1e-9), {}, weight)

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns the log odds that the label is 1 [C]."""
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
    """An MLP over two unit vectors and their product. With `hidden` it also reads the vectors that they come from."""

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
        """Returns log odds [C]."""
        scale = math.sqrt(users_CD.shape[1])
        # Entries of unit vectors are about 1/√D. The scale raises the entries and their products to about 1.
        parts = [users_CD * scale, items_CD * scale, users_CD * items_CD * scale**2]
        if self.reads_hidden:
            parts += [norm(part) for norm, part in zip(self.norms, (hidden_CD, rows_CE), strict=True)]
        answer: torch.Tensor = self.mlp(torch.cat(parts, dim=1)).squeeze(1)
        return answer
