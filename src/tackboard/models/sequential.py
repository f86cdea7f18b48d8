"""Defines the rivals that PinFM is compared with: retrieval models with SASRec or HSTU, as published.

A rival takes a batch of histories. It returns a loss, or vectors of histories and items whose product is the score.

    event = √width · item + position (+ action, + time gap)  ─ dropout ─►  SASRec or HSTU  ─►  h
    score = ⟨h, item⟩                                  `full`: exact softmax over the whole catalogue
                                                       `mixed`: the same, estimated from the items of the batch
    score = cosine(h, item) / temperature              `sampled`: softmax over negatives drawn uniformly
                                                       `contrastive`: PinFM's loss, with a learned temperature

An item has one row of a plain table, which serves both as input and as output. The hidden vector of an event predicts
the next event of its row, so nothing predicts the first event. An empty history has the vector 0, so all items get the
same score. A LayerNorm precedes inner products, as in SASRec's paper; an L2 norm precedes cosines, as in HSTU's public
code. `mixed` is for catalogues that are too large to score at every step. `mixed` has the negatives and weights of
PinFM (`losses.py`), but a user's own items stay among the negatives, as in the exact softmax.

`contrastive` is for a comparison of architectures: a rival gets everything of PinFM that is not architecture. The rival
takes over the loss with its targets, negatives, popularity correction and masks of own items (`losses.with_targets`,
`losses.loss_of_targets`), cosines, and the learned temperature. The rival keeps the plain table that is both input and
output, the sum of embeddings without maps, the learned positions, the layers, and rows without a start token. So the
first event of a segment is not predicted. A rival does not read surfaces.

The published models read items and their order; HSTU also reads times, including the time of the request. The switches
`use_actions`, `use_time_gap` and `use_request_time` give a rival the inputs of PinFM except surfaces, so that both can
be compared on the same inputs. Here the request's time means the time from the newest event to the request. HSTU's bias
reads this time, as in the public code. SASRec has no input for this time, so a learned vector for the log2 bucket of
the time is added to the event's output or input. At the input, the vector passes through the layers. In training, the
vector at an event stands for the time until the next event, which is known when the next event is predicted.

Shapes: T packed events, B rows, P predictions, M distinct items, R negatives of a prediction, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch
from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import SINCE_LAST, Vocabulary
from tackboard.models.backbone import BackboneConfig, without_unread
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel
from tackboard.models.losses import (
    MAX_INVERSE_TEMPERATURE,
    LossConfig,
    Targets,
    info_nce,
    limit_temperature_,
    listed_negatives,
    loss_of_targets,
    negative_log_weights,
    with_targets,
)
from tackboard.models.tables import TableConfig
from tackboard.models.targets import Pairs, row_of_event
from tackboard.models.time_encoding import log2_bucket

SMALL_STD = 0.02
NORM_EPS = 1e-6
BLOCK_CELLS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Largest number of scores (tokens × items) that exist at one time: 128 MiB in fp32, or 512 MiB on a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainTableConfig(TableConfig):
    """The settings of one table in which each item has one row. A row is as wide as the model."""

    num_hashes: int = 1
    """Must be 1, because there is one table."""
    method: str = "modulo"
    """How item ids become rows. If the largest id is below num_rows, `modulo` gives every item its own row; with `mix`
    some items share a row."""
    dim: int = 0
    """Must be 0: rows are as wide as the model, because they are its input and its output."""
    init_std: float = SMALL_STD
    """Standard deviation of fresh rows; no fresh value is farther from 0 than twice this number."""

    def __post_init__(self) -> None:
        HashConfig.__post_init__(self)
        check(self.num_hashes == 1, "model.tables.num_hashes", self.num_hashes, "1: a plain table")
        check(self.dim == 0, "model.tables.dim", self.dim, "0, because rows are as wide as the model: set model.width")
        check(0 < self.init_std < math.inf, "model.tables.init_std", self.init_std, "above 0")
        check(self.storage == "fp32", "model.tables.storage", self.storage, "fp32: a plain table is small")


KINDS = ("full", "mixed", "sampled", "contrastive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(LossConfig):
    """The softmax of a rival's loss. The settings of PinFM's loss are for the kind `contrastive` alone."""

    kind: Literal["full", "mixed", "sampled", "contrastive"] = "full"
    """`full`: a softmax over the catalogue; data.uniform_negatives must be at least the number of items. `mixed`: an
    estimate of `full` from the batch's events and drawn items. `sampled`: a softmax over a few drawn items, as
    published. `contrastive`: PinFM's loss."""
    num_negatives: int = 128
    """Number of negatives of each prediction under `sampled`, chosen at random from the batch's drawn items."""
    temperature: float = 0.05
    """Divisor of the cosines under `sampled`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.kind in KINDS, "model.loss.kind", self.kind, ", ".join(KINDS))
        check(self.num_negatives >= 1, "model.loss.num_negatives", self.num_negatives, "1 or more")
        check(0.001 <= self.temperature <= 10, "model.loss.temperature", self.temperature, "0.001 to 10")
        names = [field.name for field in dataclasses.fields(LossConfig)]
        for name in ("num_negatives", "temperature") if self.kind == "contrastive" else names:
            value, default = getattr(self, name), getattr(type(self), name)
            check(value == default, f"model.loss.{name}", value, f"{default} with {self.kind}, which does not read it")
        is_counted = not self.streaming_frequencies
        check(is_counted, "model.loss.streaming_frequencies", True, "false, because rivals count the dataset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialConfig(ModelConfig):
    """The settings of a rival; the defaults are SASRec as published for MovieLens-1M, but with the exact softmax."""

    moved_settings: ClassVar[Mapping[str, str]] = {
        **ModelConfig.moved_settings,
        "backbone": "backbone.kind",
        **{name: f"backbone.{name}" for name in ("num_layers", "num_heads", "head_width", "ffn_width")},
        "loss": "loss.kind",
        **{name: f"loss.{name}" for name in ("num_negatives", "temperature")},
    }

    tables: PlainTableConfig = dataclasses.field(default_factory=PlainTableConfig)
    """The table of items."""
    width: int = 50
    """Width of items and of the backbone."""
    dropout: float = 0.2
    """Share of activations that training drops, in the events' vectors and in the backbone; 0 to below 1."""
    max_history: int = 200
    """Largest number of events of a history that the model reads. Longer histories are cut to their newest events;
    longer training segments are refused."""
    use_actions: bool = False
    """Read the action of each event."""
    use_time_gap: bool = False
    """Read the time between each event and the event before it."""
    use_request_time: bool = False
    """Read the time from the newest event to the request."""
    request_vector: Literal["auto", "none", "input", "output"] = "auto"
    """Where a vector of the request's time is added. `auto` adds it to the output of a backbone that reads no times,
    such as SASRec. Other backbones get no vector, because their time bias reads the request's time."""
    num_time_buckets: int = 28
    """Number of buckets of log2(seconds), for the time gap and for the request's time."""
    backbone: BackboneConfig = dataclasses.field(default_factory=lambda: BackboneConfig(kind="sasrec", num_heads=1))
    """The layers between input and output."""
    loss: SoftmaxConfig = dataclasses.field(default_factory=SoftmaxConfig)
    """The softmax of the loss. With `sampled`, scores are cosines."""

    def __post_init__(self) -> None:
        check(isinstance(self.tables, PlainTableConfig), "model.tables", self.tables, "a PlainTableConfig")
        places = ("auto", "none", "input", "output")
        check(self.request_vector in places, "model.request_vector", self.request_vector, ", ".join(places))
        for name in ("width", "max_history"):
            check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        positions = self.backbone.positions
        check(positions == "learned", "model.backbone.positions", positions, "learned: positions are part of the input")
        self.backbone.check_width(self.width)
        check(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "0 to below 1")
        check(1 <= self.num_time_buckets <= 64, "model.num_time_buckets", self.num_time_buckets, "1 to 64")
        reaches = self.loss.future_token_weight == 0 or self.loss.future_token_anchor < self.max_history
        allowed = f"below max_history {self.max_history}"
        check(reaches, "model.loss.future_token_anchor", self.loss.future_token_anchor, allowed)
        has_place = not self.use_request_time or self.backbone.reads_times or self.request_vector != "none"
        check(has_place, "model.request_vector", self.request_vector, "auto, input, output: SASRec has no time bias")

    @classmethod
    def from_stored(cls, values: Any) -> Self:
        return super().from_stored(without_unread(values, "sasrec"))

    @property
    def has_cosines(self) -> bool:
        """Whether scores are cosines over a temperature, and not inner products."""
        return self.loss.kind in ("sampled", "contrastive")

    @property
    def meaning_of_scores(self) -> str:
        kind = "the cosine" if self.has_cosines else "the inner product"
        return (
            f"A score is {kind} of a user's and an item's vector{', divided by the temperature' * self.has_cosines}. "
            "Scores rank candidates for one user; they are not probabilities and not comparable between versions."
        )

    @property
    def needs_drawn_negatives(self) -> bool:
        return self.loss.kind != "contrastive" or not self.loss.in_batch_negatives

    @property
    def least_max_length(self) -> int:
        return self.loss.future_token_anchor + 1 if self.loss.future_token_weight else 2

    @property
    def request_place(self) -> str:
        """The place where the vector of the request's time is added: none, input or output."""
        if not self.use_request_time:
            return "none"
        if self.request_vector == "auto":
            return "none" if self.backbone.reads_times else "output"
        return self.request_vector

    @property
    def reads(self) -> tuple[str, ...]:
        wanted = {
            "history.item": True,
            "history.action": self.use_actions,
            "history.time": self.backbone.reads_times,
            "history.gap": self.use_time_gap or self.request_place == "input",
            SINCE_LAST: self.use_request_time,
        }
        return tuple(name for name, is_read in wanted.items() if is_read)

    def build(self, vocabulary: Vocabulary) -> SequentialModel:
        return SequentialModel(self, vocabulary)


def sasrec(num_rows: int, **settings: Any) -> SequentialConfig:
    """Returns SASRec with sampled softmax as published for MovieLens-1M, with a table of `num_rows` rows.

    Each keyword in `settings` replaces a published setting; `backbone` and `loss` are mappings of settings to replace.
    """
    return _published(num_rows, {"kind": "sasrec", "num_layers": 2, "num_heads": 1, "ffn_width": 50}, settings)


def hstu(num_rows: int, **settings: Any) -> SequentialConfig:
    """Returns HSTU as published for MovieLens-1M. It reads the request's time. `settings` is as in `sasrec`."""
    published = {"kind": "hstu", "num_layers": 2, "num_heads": 1, "head_width": 50}
    return _published(num_rows, published, {"use_request_time": True} | settings)


def hstu_large(num_rows: int, **settings: Any) -> SequentialConfig:
    """Returns HSTU-large as published for MovieLens-1M. It reads the request's time. `settings` is as in `sasrec`."""
    published = {"kind": "hstu", "num_layers": 8, "num_heads": 2, "head_width": 25}
    return _published(num_rows, published, {"use_request_time": True} | settings)


def _published(num_rows: int, backbone: dict[str, Any], settings: dict[str, Any]) -> SequentialConfig:
    loss = {"kind": "sampled"} | settings.get("loss", {})
    parts = {
        "tables": PlainTableConfig(num_rows=num_rows),
        "backbone": BackboneConfig(**(backbone | settings.get("backbone", {}))),
        "loss": SoftmaxConfig(**loss),
    }
    return SequentialConfig(**({"width": 50, "dropout": 0.2, "max_history": 200} | settings | parts))


@dataclasses.dataclass(frozen=True)
class PredictedEvents:
    """What the CPU computes before the batch is copied. If a GPU did, the host would have to wait for the lengths."""

    events: torch.Tensor
    """The events that are predicted, each from the event before it [P]."""
    layout: RowLayout
    """Where the rows of events lie."""


class SequentialModel(RetrievalModel):
    """See the module's docstring."""

    def __init__(self, config: SequentialConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.items = nn.Embedding(config.tables.num_rows, width)
        self.positions = nn.Embedding(config.max_history, width)
        self.actions = nn.Embedding(vocabulary.num_actions, width) if config.use_actions else None
        self.time_gaps = nn.Embedding(config.num_time_buckets, width) if config.use_time_gap else None
        self.request_times: nn.Embedding | None = None
        if config.request_place != "none":
            self.request_times = nn.Embedding(config.num_time_buckets, width)
        # Items and positions are initialised as in the public code. The embeddings that we added start small, because
        # with the std of positions these embeddings outweighed the items.
        stds = {self.items: config.tables.init_std, self.positions: width**-0.5}
        for embedding in (self.items, self.positions, self.actions, self.time_gaps, self.request_times):
            if embedding is not None:
                std = stds.get(embedding, SMALL_STD)
                nn.init.trunc_normal_(embedding.weight, std=std, a=-2 * std, b=2 * std)
        self.entropy = CrossEntropy(1.0 / config.loss.temperature if config.loss.kind == "sampled" else 1.0)
        self.log_inverse_temperature: nn.Parameter | None = None
        if config.loss.kind == "contrastive":
            self.log_inverse_temperature = nn.Parameter(torch.tensor(-math.log(config.loss.initial_temperature)))
        self.backbone = config.backbone.build(
            width=width,
            max_positions=config.max_history,
            dropout=config.dropout,
            positions="none",  # Positions are part of the input already.
            final_norm=not config.has_cosines,
        )

    def loss(self, batch: SequenceBatch) -> LossOutput:
        """Returns the softmax loss of positive events, each predicted from the event before it in its row.

        With `contrastive`, an event may also be predicted from earlier events of its row.
        """
        if self.log_inverse_temperature is not None:
            return self._contrastive_loss(batch, self.log_inverse_temperature)
        batch = self.prepare(batch) if batch.targets is None else batch
        events_P: torch.Tensor = batch.targets.events
        items_MD = self.items(batch.item_rows[:, 0])
        hidden_TD = self._hidden(batch, items_MD, None)
        if len(events_P) == 0:
            return LossOutput(hidden_TD.sum() * 0.0, {}, torch.zeros(()))
        hidden_PD = hidden_TD.index_select(0, events_P - 1)
        if self.config.request_place == "output":
            hidden_PD = hidden_PD + self._request_vectors(batch.of_request(SINCE_LAST).index_select(0, events_P))
        loss = self._mixed_loss if self.config.loss.kind == "mixed" else self._entropy_loss
        targets_P = batch.items.index_select(0, events_P)
        value = loss(self._project(hidden_PD), self._project(items_MD), batch, targets_P)
        return LossOutput(value, {}, torch.tensor(float(len(events_P))))

    def prepare(self, batch: SequenceBatch, generator: torch.Generator | None = None) -> SequenceBatch:
        """Returns the batch with the events to predict and the layout of its rows, which need no parameters.

        With `contrastive`, the targets are those of PinFM's loss, and `generator` draws multi-token pairs. Raises
        ConfigError if the batch lacks items that the loss needs.
        """
        if self.config.loss.kind == "contrastive":
            return with_targets(batch, self.config.loss, generator, has_start_tokens=False)
        is_first_T = torch.zeros_like(batch.is_positive)
        is_first_T[batch.offsets[:-1][batch.lengths() > 0]] = True
        events_P = (batch.is_positive & ~is_first_T).nonzero().squeeze(1)
        num_drawn, is_whole = len(batch.sampled), len(batch.sampled) == len(batch.item_ids)
        if len(events_P) and self.config.loss.kind == "full" and not (is_whole and float(batch.sample_rate) >= 1.0):
            raise ConfigError(
                f"model.loss.kind is 'full', but only {num_drawn:,} items were drawn for this batch",
                allowed="the exact softmax needs the whole catalogue in every batch",
                fix="set data.uniform_negatives to the number of items or more, or model.loss.kind to mixed",
            )
        return batch.with_targets(PredictedEvents(events_P, RowLayout.of_lengths(batch.lengths())))

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """Returns one vector per history [B, D]: the prediction after its last event, or 0 for an empty history."""
        if batch.num_events == 0:
            return self.items.weight.new_zeros(batch.num_rows, self.config.width)
        since_B = batch.of_request(SINCE_LAST) if self.config.use_request_time else None
        hidden_TD = self._hidden(batch, self.items(batch.item_rows[:, 0]), since_B)
        users_BD = hidden_TD.index_select(0, (batch.offsets[1:] - 1).clamp_min(0))
        if self.config.request_place == "output" and since_B is not None:
            users_BD = users_BD + self._request_vectors(since_B)
        return self._project(users_BD) * (batch.lengths() > 0)[:, None]

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        return self._project(self.items(item_rows[:, 0]))

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns inner products, or cosines divided by the temperature [C]."""
        if self.log_inverse_temperature is not None:
            return super().scores(batch) * self.log_inverse_temperature.exp().clamp_max(MAX_INVERSE_TEMPERATURE)
        return super().scores(batch) * self.entropy.scale

    def _project(self, vectors: torch.Tensor) -> torch.Tensor:
        """Returns unit vectors if scores are cosines, else the vectors as they are."""
        return functional.normalize(vectors, dim=-1, eps=NORM_EPS) if self.config.has_cosines else vectors

    def _hidden(self, batch: SequenceBatch, items_MD: torch.Tensor, since_B: torch.Tensor | None) -> torch.Tensor:
        """Returns hidden vectors of the events [T, D]. `since_B` holds seconds from a row's last event to the request.

        In training no request follows the last event of a row, and the hidden vector of that event predicts nothing.
        """
        layout = RowLayout.of_lengths(batch.lengths()) if batch.targets is None else batch.targets.layout
        layout.check_fits(self.config.max_history)
        # Unlike indexing, embedding() adds up gradients in a fixed order, so a resumed run repeats every bit.
        x_TD = functional.embedding(batch.items, items_MD) * math.sqrt(self.config.width)
        x_TD = x_TD + self.positions(layout.places)
        if self.actions is not None:
            x_TD = x_TD + self.actions(batch.actions)
        last_bucket = self.config.num_time_buckets - 1
        if self.time_gaps is not None:
            x_TD = x_TD + self.time_gaps(batch.column("gap").clamp(0, last_bucket))
        since_B = torch.zeros(batch.num_rows, device=x_TD.device) if since_B is None else since_B
        if self.config.request_place == "input" and self.request_times is not None:
            gaps_T = batch.column("gap").clamp(0, last_bucket)
            asked_B = log2_bucket(since_B, self.config.num_time_buckets)
            x_TD = x_TD + self.request_times(_of_next(batch, gaps_T, asked_B))
        x_TD = functional.dropout(x_TD, self.config.dropout, self.training)
        times_T = asked_T = None
        if self.config.backbone.reads_times:
            times_T = batch.times_ms
            if self.config.use_request_time:
                last_B = times_T.index_select(0, (batch.offsets[1:] - 1).clamp_min(0))
                asked_T = _of_next(batch, times_T, last_B + (since_B.clamp_min(0).double() * 1000).round().long())
        hidden: torch.Tensor = self.backbone(x_TD, batch.lengths(), times_T, asked_T, layout)
        return hidden

    def _request_vectors(self, since: torch.Tensor) -> torch.Tensor:
        """Returns vectors for times from the newest event to the request, given in seconds."""
        assert self.request_times is not None
        return self.request_times(log2_bucket(since, self.config.num_time_buckets))

    def _contrastive_loss(self, batch: SequenceBatch, log_inverse_temperature: nn.Parameter) -> LossOutput:
        """Returns PinFM's loss of the batch."""
        if self.training:
            limit_temperature_(log_inverse_temperature)
        batch = self.prepare(batch) if batch.targets is None else batch
        targets: Targets = batch.targets
        items_MD = self.items(batch.item_rows[:, 0])
        hidden_TD = self._hidden(batch, items_MD, None)
        weight = torch.tensor(float(targets.parts[0][1]))
        if len(targets.pairs) == 0:
            return LossOutput(hidden_TD.sum() * 0.0, {}, weight)
        hidden_AD = hidden_TD.index_select(0, targets.tokens)
        if self.config.request_place == "output":
            # A token that predicts something is never the last of its row.
            since_A = batch.of_request(SINCE_LAST).index_select(0, targets.tokens + 1)
            hidden_AD = hidden_AD + self._request_vectors(since_A)
        log_weights_M = negative_log_weights(
            batch,
            in_batch=self.config.loss.in_batch_negatives,
            correct_popularity=self.config.loss.correct_popularity,
            counts_M=targets.counts,
        )
        users_AD, items_MD = self._project(hidden_AD), self._project(items_MD)
        negatives = listed_negatives(batch, in_batch=self.config.loss.in_batch_negatives)
        temperature = log_inverse_temperature.exp()
        total, metrics = loss_of_targets(users_AD, items_MD, temperature, targets, log_weights_M, negatives)
        return LossOutput(total, metrics, weight)

    def _mixed_loss(
        self, hidden_PD: torch.Tensor, items_MD: torch.Tensor, batch: SequenceBatch, targets_P: torch.Tensor
    ) -> torch.Tensor:
        """Returns the mean cross entropy of targets against all items of the batch, weighted as in `losses`."""
        order_P = torch.arange(len(targets_P), device=targets_P.device)
        pairs = Pairs(tokens=order_P, items=targets_P, rows=torch.zeros_like(targets_P))
        weights_P = torch.full((len(pairs),), 1.0 / max(1, len(pairs)), device=targets_P.device)
        total, _ = info_nce(hidden_PD, items_MD, pairs, weights_P, negative_log_weights(batch), None)
        return total

    def _entropy_loss(
        self, hidden_PD: torch.Tensor, items_MD: torch.Tensor, batch: SequenceBatch, targets_P: torch.Tensor
    ) -> torch.Tensor:
        """Returns the mean cross entropy of targets, over the catalogue or over each target and its own negatives."""
        loss, negatives_PR = self.config.loss, None
        num_cells = len(items_MD)
        if loss.kind == "sampled":
            negatives_PR = draw_negatives(batch.sampled, len(targets_P), loss.num_negatives)
            num_cells = loss.num_negatives * self.config.width
        return in_blocks(self.entropy, num_cells, (items_MD,), (hidden_PD, targets_P, negatives_PR)).mean()


def in_blocks(
    of_block: Callable[..., torch.Tensor],
    num_cells: int,
    shared: Sequence[torch.Tensor | None],
    of_rows: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Splits the rows of `of_rows` into blocks, calls `of_block` with `shared` and each block, and joins the results.

    A row needs `num_cells` numbers, and about BLOCK_CELLS numbers exist at a time. If there are several blocks, the
    backward pass computes each block again, so that no block is kept until then. The first of `of_rows` is never None.
    """
    first = of_rows[0]
    assert first is not None
    step = max(1, BLOCK_CELLS[first.device.type] // max(1, num_cells))
    blocks = []
    for begin in range(0, len(first), step):
        rows = [None if tensor is None else tensor[begin : begin + step] for tensor in of_rows]
        if len(first) > step and torch.is_grad_enabled():
            blocks.append(checkpoint(of_block, *shared, *rows, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(of_block(*shared, *rows))
    return torch.cat(blocks) if blocks else first.new_zeros(0)


class CrossEntropy(nn.Module):
    """Computes the cross entropy of each prediction [p], over all items or over its target and its own negatives."""

    compiles = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        items_MD: torch.Tensor,
        hidden_pD: torch.Tensor,
        targets_p: torch.Tensor,
        negatives_pR: torch.Tensor | None,
    ) -> torch.Tensor:
        if negatives_pR is None:
            return functional.cross_entropy(hidden_pD @ items_MD.T, targets_p, reduction="none")
        choices_pR = torch.cat([targets_p[:, None], negatives_pR], dim=1)
        vectors_pRD = functional.embedding(choices_pR, items_MD)
        logits_pR = (vectors_pRD @ hidden_pD[:, :, None].to(vectors_pRD.dtype)).squeeze(2) * self.scale
        is_target_pR = choices_pR == targets_p[:, None]
        is_target_pR[:, 0] = False  # A draw that is the target itself is not a negative.
        logits_pR = logits_pR.float().masked_fill(is_target_pR, float("-inf"))
        return functional.cross_entropy(logits_pR, torch.zeros_like(targets_p), reduction="none")


def draw_negatives(sampled_K: torch.Tensor, num_predictions: int, num_negatives: int) -> torch.Tensor:
    """Draws negatives [P, R] uniformly with replacement from the batch's drawn items `sampled_K`."""
    if len(sampled_K) == 0:
        raise ConfigError(
            "model.loss.kind is 'sampled', but no item was drawn for this batch",
            fix="set data.uniform_negatives to the number of items to draw, ideally to the number of all items",
        )
    drawn_PR = torch.randint(len(sampled_K), (num_predictions, num_negatives), device=sampled_K.device)
    return sampled_K[drawn_PR]


def _of_next(batch: SequenceBatch, values_T: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
    """Returns for each event the value of the next event in its row [T]; a row's last event gets the row's `last_B`."""
    rows_T = row_of_event(batch)
    is_last_T = batch.offsets[1:].index_select(0, rows_T) == torch.arange(1, len(rows_T) + 1, device=rows_T.device)
    return torch.where(is_last_T, last_B.index_select(0, rows_T), values_T.roll(-1))
