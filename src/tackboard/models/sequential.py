"""The rivals: SASRec and HSTU as published, behind the methods of a `SequenceModel`.

In: a batch of histories. Out: a loss, or one vector per history and per item whose product is the score.

    event = √width · item + position (+ action, + time gap)  ─ dropout ─►  SASRec or HSTU  ─►  h
    score = ⟨h, item⟩                                  `full`: exact softmax over the whole catalogue
                                                       `mixed`: the same, estimated from the items of the batch
    score = cosine(h, item) / temperature              `sampled`: softmax over negatives drawn uniformly

An item has one row of a plain table, the same as input and as output. The hidden vector of an event predicts the next
event of its row; so nothing predicts the first one, and an empty history is the vector 0, for which all items score
alike. Inner products have a LayerNorm before them, as in SASRec's paper; under cosines the L2 norm stands in its place,
as in HSTU's public code. `mixed` is for catalogues too large for all items at every step: its negatives, and how each
is weighted, are PinFM's (`losses.py`), except that a user's own items stay among them, as in the exact softmax. SASRec
drops attention weights too, as published.

The published models read items and order, HSTU also times, and the time of the request with them. The switches
`use_actions`, `use_time_gap` and `use_request_time` give a rival what PinFM reads, so that both can be compared on the
same inputs. The time of the request is that from the newest event to it. HSTU's bias reads it, as in the public code.
SASRec has no place for it, so a vector of its log2 bucket is added: to the output, or to the event's input, where the
layers can work with it; an event then says how long it was until the next, which is known by then.

Shapes: T packed events, B rows, P predictions, M distinct items, R negatives of a prediction, D width, H heads, d width
of a head, S positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import SINCE_LAST, Vocabulary
from tackboard.models.backbone import Packing
from tackboard.models.hstu import HSTU
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel
from tackboard.models.losses import BLOCK_CELLS, LogSum, info_nce, negative_log_weights
from tackboard.models.targets import Pairs
from tackboard.models.time_encoding import log2_bucket

SMALL_STD = 0.02
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialConfig(ModelConfig):
    """A rival; the defaults are SASRec as published for MovieLens-1M, with the exact softmax."""

    hashing: HashConfig = dataclasses.field(
        default_factory=lambda: HashConfig(num_hashes=1, num_rows=4096, method="modulo")
    )
    """How item ids become rows of the one table; above the largest id, `modulo` gives every item its own."""
    backbone: Literal["sasrec", "hstu"] = "sasrec"
    """What stands between input and output."""
    width: int = 50
    """Width of items and of the backbone."""
    num_layers: int = 2
    """Layers of the backbone."""
    num_heads: int = 1
    """Attention heads; must divide width where head_width is 0."""
    head_width: int = 0
    """Width of an HSTU head's queries, keys and values; 0: width over num_heads, as SASRec always has it."""
    ffn_width: int = 50
    """Width of the hidden layer of SASRec's pointwise network; HSTU has none."""
    dropout: float = 0.2
    """Share of activations dropped in training, 0 to below 1."""
    max_history: int = 200
    """Events of a history that the model reads, the newest; longer training segments are refused."""
    loss: Literal["full", "mixed", "sampled"] = "full"
    """`full`: softmax over the catalogue, for which data.uniform_negatives has to be its size; `mixed`: an estimate of
    it from the batch's events and the data.uniform_negatives drawn items; `sampled`: over a few of these, as
    published."""
    num_negatives: int = 128
    """Negatives of each prediction under `sampled`, drawn from the items that the batch drew."""
    temperature: float = 0.05
    """What cosines are divided by under `sampled`."""
    use_actions: bool = False
    """Read what the user did with each item."""
    use_time_gap: bool = False
    """Read the time from each event to the one before it."""
    use_request_time: bool = False
    """Read the time from the newest event to the request."""
    request_vector: Literal["auto", "none", "input", "output"] = "auto"
    """Where a vector of the request's time is added; auto: to SASRec's output, nowhere with HSTU, whose bias has it."""
    num_time_buckets: int = 28
    """Buckets of log2(seconds) of the time gap and of the request's time."""

    def __post_init__(self) -> None:
        check(self.backbone in ("sasrec", "hstu"), "model.backbone", self.backbone, "sasrec, hstu")
        losses = ("full", "mixed", "sampled")
        check(self.loss in losses, "model.loss", self.loss, ", ".join(losses))
        places = ("auto", "none", "input", "output")
        check(self.request_vector in places, "model.request_vector", self.request_vector, ", ".join(places))
        check(self.hashing.num_hashes == 1, "model.hashing.num_hashes", self.hashing.num_hashes, "1: a plain table")
        for name in ("width", "num_layers", "num_heads", "ffn_width", "max_history", "num_negatives"):
            check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        check(self.head_width >= 0, "model.head_width", self.head_width, "0 or more")
        check(self.backbone == "hstu" or not self.head_width, "model.head_width", self.head_width, "0 with sasrec")
        fits = bool(self.head_width) or self.width % self.num_heads == 0
        check(fits, "model.num_heads", self.num_heads, f"a divisor of width {self.width}")
        check(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "0 to below 1")
        check(0.001 <= self.temperature <= 10, "model.temperature", self.temperature, "0.001 to 10")
        check(1 <= self.num_time_buckets <= 64, "model.num_time_buckets", self.num_time_buckets, "1 to 64")
        has_place = not self.use_request_time or self.backbone == "hstu" or self.request_vector != "none"
        check(has_place, "model.request_vector", self.request_vector, "auto, input, output: SASRec has no other place")

    @property
    def has_cosines(self) -> bool:
        """Whether scores are cosines over a temperature, and not inner products."""
        return self.loss == "sampled"

    @property
    def needs_drawn_negatives(self) -> bool:
        """Whether there are no negatives but those of data.uniform_negatives."""
        return True

    @property
    def request_place(self) -> str:
        """Where the vector of the request's time is added: none, input or output."""
        if not self.use_request_time:
            return "none"
        if self.request_vector == "auto":
            return "output" if self.backbone == "sasrec" else "none"
        return self.request_vector

    @property
    def reads(self) -> tuple[str, ...]:
        """The features the model reads."""
        wanted = {
            "history.item": True,
            "history.action": self.use_actions,
            "history.time": self.backbone == "hstu",
            "history.gap": self.use_time_gap or self.request_place == "input",
            SINCE_LAST: self.use_request_time,
        }
        return tuple(name for name, is_read in wanted.items() if is_read)

    def build(self, vocabulary: Vocabulary) -> SequentialModel:
        """A model with fresh parameters."""
        return SequentialModel(self, vocabulary)


def sasrec(num_rows: int, **settings: Any) -> SequentialConfig:
    """SASRec with sampled softmax as published for MovieLens-1M, its table of `num_rows`; `settings` replace some."""
    return _published(num_rows, {"backbone": "sasrec", "num_layers": 2, "num_heads": 1, "ffn_width": 50}, settings)


def hstu(num_rows: int, **settings: Any) -> SequentialConfig:
    """HSTU as published for MovieLens-1M, which reads the request's time; `settings` replace some."""
    published = {"backbone": "hstu", "num_layers": 2, "num_heads": 1, "head_width": 50, "use_request_time": True}
    return _published(num_rows, published, settings)


def hstu_large(num_rows: int, **settings: Any) -> SequentialConfig:
    """HSTU-large as published for MovieLens-1M, which reads the request's time; `settings` replace some."""
    published = {"backbone": "hstu", "num_layers": 8, "num_heads": 2, "head_width": 25, "use_request_time": True}
    return _published(num_rows, published, settings)


def _published(num_rows: int, published: dict[str, Any], settings: dict[str, Any]) -> SequentialConfig:
    shared: dict[str, Any] = {
        "hashing": HashConfig(num_hashes=1, num_rows=num_rows, method="modulo"),
        "width": 50,
        "dropout": 0.2,
        "max_history": 200,
        "loss": "sampled",
        "num_negatives": 128,
        "temperature": 0.05,
    }
    return SequentialConfig(**(shared | published | settings))


class SASRecLayer(nn.Module):
    """Attention of normed queries to tokens as they are, beside the normed query; then a pointwise network."""

    compiles = True

    def __init__(self, width: int, num_heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.attention_out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, ffn_width)
        self.ffn_out = nn.Linear(ffn_width, width)

    def forward(self, x_TD: torch.Tensor, packing: Packing) -> torch.Tensor:
        """One layer."""
        query_TD = self.query_norm(x_TD)
        grid = packing.spread(torch.cat([self.query(query_TD), self.key_value(x_TD)], dim=1))
        q, k, v = grid.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed_BHSd = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        read_TD = self.attention_out(packing.collect(mixed_BHSd.transpose(1, 2).flatten(2)))
        y_TD = self.ffn_norm(query_TD + read_TD)
        return y_TD + self._drop(self.ffn_out(self._drop(functional.relu(self.ffn_in(y_TD)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class SASRec(nn.Module):
    """A stack of layers, with the signature of the other backbones; it reads no times."""

    def __init__(
        self, *, width: int, num_layers: int, num_heads: int, ffn_width: int, dropout: float, final_norm: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SASRecLayer(width, num_heads, ffn_width, dropout) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width) if final_norm else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        x_TD: torch.Tensor,
        lengths_B: torch.Tensor,
        times_T: torch.Tensor | None = None,
        query_times_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden vectors of packed events; an event sees itself and those before it in its row."""
        packing = Packing.from_lengths(lengths_B)
        if packing.longest == 0:
            return x_TD
        for layer in self.layers:
            x_TD = layer(x_TD, packing)
        return x_TD if self.final_norm is None else self.final_norm(x_TD)


class SequentialModel(RetrievalModel):
    """See the module's docstring."""

    def __init__(self, config: SequentialConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.items = nn.Embedding(config.hashing.num_rows, width)
        self.positions = nn.Embedding(config.max_history, width)
        self.actions = nn.Embedding(vocabulary.num_actions, width) if config.use_actions else None
        self.time_gaps = nn.Embedding(config.num_time_buckets, width) if config.use_time_gap else None
        self.request_times: nn.Embedding | None = None
        if config.request_place != "none":
            self.request_times = nn.Embedding(config.num_time_buckets, width)
        # Items and positions as in the public code. What is ours begins small: drawn like positions, it drowned items.
        for embedding in (self.items, self.positions, self.actions, self.time_gaps, self.request_times):
            if embedding is not None:
                std = width**-0.5 if embedding is self.positions else SMALL_STD
                nn.init.trunc_normal_(embedding.weight, std=std, a=-2 * std, b=2 * std)
        sizes: dict[str, Any] = {
            "width": width,
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "dropout": config.dropout,
            "final_norm": not config.has_cosines,
        }
        entropies = {"full": CatalogueEntropy(), "mixed": LogSum(), "sampled": SampledEntropy(1.0 / config.temperature)}
        self.entropy = entropies[config.loss]
        self.backbone: nn.Module
        if config.backbone == "sasrec":
            self.backbone = SASRec(**sizes, ffn_width=config.ffn_width)
        else:
            self.backbone = HSTU(
                **sizes,
                positions="none",
                max_positions=config.max_history,
                head_width=config.head_width,
                value_width=config.head_width,
            )

    def loss(self, batch: SequenceBatch) -> LossOutput:
        """Softmax loss of every positive event but those that begin a row, predicted from the event before."""
        items_MD = self.items(batch.item_rows[:, 0])
        hidden_TD = self._hidden(batch, items_MD, None)
        is_first_T = torch.zeros_like(batch.is_positive)
        is_first_T[batch.offsets[:-1][batch.lengths() > 0]] = True
        events_P = (batch.is_positive & ~is_first_T).nonzero().squeeze(1)
        if len(events_P) == 0:
            return LossOutput(hidden_TD.sum() * 0.0, {})
        hidden_PD = hidden_TD.index_select(0, events_P - 1)
        if self.config.request_place == "output":
            hidden_PD = hidden_PD + self._request_vectors(batch.of_request(SINCE_LAST).index_select(0, events_P))
        losses = {"full": self._full_loss, "mixed": self._mixed_loss, "sampled": self._sampled_loss}
        loss = losses[self.config.loss]
        return LossOutput(loss(self._project(hidden_PD), self._project(items_MD), batch, events_P), {})

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """One vector per history [B, D]: the prediction of what comes after its last event; 0 where there is none."""
        if batch.num_events == 0:
            return self.items.weight.new_zeros(batch.num_rows, self.config.width)
        since_B = batch.of_request(SINCE_LAST) if self.config.use_request_time else None
        hidden_TD = self._hidden(batch, self.items(batch.item_rows[:, 0]), since_B)
        users_BD = hidden_TD.index_select(0, (batch.offsets[1:] - 1).clamp_min(0))
        if self.config.request_place == "output" and since_B is not None:
            users_BD = users_BD + self._request_vectors(since_B)
        return self._project(users_BD) * (batch.lengths() > 0)[:, None]

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        """One vector per item [M, D]."""
        return self._project(self.items(item_rows[:, 0]))

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Inner products, or cosines over temperature [C]."""
        return super().scores(batch) * self._scale

    @property
    def _scale(self) -> float:
        return 1.0 / self.config.temperature if self.config.has_cosines else 1.0

    def _project(self, vectors: torch.Tensor) -> torch.Tensor:
        """Unit vectors where scores are cosines, else the vectors as they are."""
        return functional.normalize(vectors, dim=-1, eps=NORM_EPS) if self.config.has_cosines else vectors

    def _hidden(self, batch: SequenceBatch, items_MD: torch.Tensor, since_B: torch.Tensor | None) -> torch.Tensor:
        """Hidden vectors of the events [T, D]; `since_B` seconds lie between a row's last event and the request.

        In training there is no request after a row's last event, and its hidden vector predicts nothing.
        """
        packing = Packing.from_lengths(batch.lengths())
        packing.check_fits(self.config.max_history)
        # embedding(), not indexing: its backward adds up in a fixed order, so a resumed run repeats every bit.
        x_TD = functional.embedding(batch.items, items_MD) * math.sqrt(self.config.width)
        x_TD = x_TD + self.positions(packing.places)
        if self.actions is not None:
            x_TD = x_TD + self.actions(batch.actions)
        last_bucket = self.config.num_time_buckets - 1
        if self.time_gaps is not None:
            x_TD = x_TD + self.time_gaps(batch.column("gap").clamp(0, last_bucket))
        since_B = torch.zeros(batch.num_rows, device=x_TD.device) if since_B is None else since_B
        if self.config.request_place == "input" and self.request_times is not None:
            gaps_T = batch.column("gap").clamp(0, last_bucket)
            x_TD = x_TD + self.request_times(_of_next(batch, gaps_T, self._request_buckets(since_B)))
        x_TD = functional.dropout(x_TD, self.config.dropout, self.training)
        if self.config.backbone == "sasrec":
            return self.backbone(x_TD, batch.lengths())
        asked_T = None
        if self.config.use_request_time:
            last_B = batch.times_ms.index_select(0, (batch.offsets[1:] - 1).clamp_min(0))
            asked_T = _of_next(batch, batch.times_ms, last_B + (since_B.clamp_min(0).double() * 1000).round().long())
        return self.backbone(x_TD, batch.lengths(), batch.times_ms, asked_T)

    def _request_buckets(self, since: torch.Tensor) -> torch.Tensor:
        return log2_bucket(since, self.config.num_time_buckets)

    def _request_vectors(self, since: torch.Tensor) -> torch.Tensor:
        """Vectors of the time from the newest event to the request, in seconds."""
        assert self.request_times is not None
        return self.request_times(self._request_buckets(since))

    def _full_loss(
        self, hidden_PD: torch.Tensor, items_MD: torch.Tensor, batch: SequenceBatch, events_P: torch.Tensor
    ) -> torch.Tensor:
        """Mean cross entropy over all items of the catalogue, some predictions at a time."""
        num_items = len(items_MD)
        if len(batch.sampled) != num_items or float(batch.sample_rate) < 1.0:
            raise ConfigError(
                f"model.loss = 'full', but {len(batch.sampled):,} items were drawn for this batch",
                allowed="the exact softmax needs the whole catalogue in every batch",
                fix="set data.uniform_negatives to the number of items or more, or model.loss to mixed",
            )
        targets_P = batch.items.index_select(0, events_P)
        return _summed_in_parts(self.entropy, items_MD, num_items, hidden_PD, targets_P) / len(hidden_PD)

    def _mixed_loss(
        self, hidden_PD: torch.Tensor, items_MD: torch.Tensor, batch: SequenceBatch, events_P: torch.Tensor
    ) -> torch.Tensor:
        """Mean cross entropy of each target against all items of the batch, each weighted by how often it is there."""
        targets_P = batch.items.index_select(0, events_P)
        order_P = torch.arange(len(targets_P), device=targets_P.device)
        pairs = Pairs(tokens=order_P, items=targets_P, rows=torch.zeros_like(targets_P))
        return info_nce(hidden_PD, items_MD, pairs, negative_log_weights(batch), None, log_sum=self.entropy).mean()

    def _sampled_loss(
        self, hidden_PD: torch.Tensor, items_MD: torch.Tensor, batch: SequenceBatch, events_P: torch.Tensor
    ) -> torch.Tensor:
        """Mean cross entropy of each target against its own negatives, some predictions at a time."""
        targets_P = batch.items.index_select(0, events_P)
        negatives_PR = draw_negatives(batch.sampled, len(targets_P), self.config.num_negatives)
        cells = self.config.num_negatives * self.config.width
        return _summed_in_parts(self.entropy, items_MD, cells, hidden_PD, targets_P, negatives_PR) / len(hidden_PD)


class CatalogueEntropy(nn.Module):
    """The summed cross entropy of predictions [p] over all items."""

    compiles = True

    def forward(self, items_MD: torch.Tensor, hidden_pD: torch.Tensor, targets_p: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return functional.cross_entropy(hidden_pD @ items_MD.T, targets_p, reduction="sum")


class SampledEntropy(nn.Module):
    """The summed cross entropy of predictions [p], each over its target and its own negatives."""

    compiles = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, items_MD: torch.Tensor, hidden_pD: torch.Tensor, targets_p: torch.Tensor, negatives_pR: torch.Tensor
    ) -> torch.Tensor:
        """The sum."""
        choices_pR = torch.cat([targets_p[:, None], negatives_pR], dim=1)
        vectors_pRD = functional.embedding(choices_pR, items_MD)
        logits_pR = (vectors_pRD @ hidden_pD[:, :, None].to(vectors_pRD.dtype)).squeeze(2) * self.scale
        is_target_pR = choices_pR == targets_p[:, None]
        is_target_pR[:, 0] = False  # A draw that is the target itself is no negative.
        logits_pR = logits_pR.float().masked_fill(is_target_pR, float("-inf"))
        return functional.cross_entropy(logits_pR, torch.zeros_like(targets_p), reduction="sum")


def draw_negatives(sampled_K: torch.Tensor, num_predictions: int, num_negatives: int) -> torch.Tensor:
    """Uniform draws with replacement [P, R] from the items that the batch drew, as positions among its items."""
    if len(sampled_K) == 0:
        raise ConfigError(
            "model.loss = 'sampled', but no item was drawn for this batch",
            fix="set data.uniform_negatives to the number of items to draw from, at best all",
        )
    drawn_PR = torch.randint(len(sampled_K), (num_predictions, num_negatives), device=sampled_K.device)
    return sampled_K[drawn_PR]


def _summed_in_parts(
    summed: Callable[..., torch.Tensor], items_MD: torch.Tensor, cells: int, *of_predictions: torch.Tensor
) -> torch.Tensor:
    """The sum of `summed` over parts of the predictions; each has `cells` numbers, and BLOCK_CELLS exist at a time.

    Where there are several parts, each is computed again in the backward pass, so that none is kept until then.
    """
    size = max(1, BLOCK_CELLS[items_MD.device.type] // cells)
    parts = list(zip(*(tensor.split(size) for tensor in of_predictions), strict=True))
    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.stack([summed(items_MD, *part) for part in parts]).sum()
    sums = [checkpoint(summed, items_MD, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum()


def _of_next(batch: SequenceBatch, values_T: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
    """For each event the value of the next one in its row [T], for the last one that of `last_B`."""
    is_filled_B = batch.lengths() > 0
    return values_T.roll(-1).index_copy(0, batch.offsets[1:][is_filled_B] - 1, last_B[is_filled_B])
