"""PinFM: a causal model of everything users did, with nearly all parameters in hashed tables.

In: a batch of histories. Out: a loss, or one vector per history and per item whose product is the score.

    event = item tables + action + surface + time gap  ─ φ_in ─►  decoder  ─ φ_out ─►  H   (a unit vector)
    item  = item tables                                ─────────── ψ ──────────────►  z   (a unit vector)
    score = ⟨H, z⟩ / temperature

φ_in, φ_out and ψ are pointwise MLPs with an L2 norm. Where the publication is silent, decided here: each history
begins with a learned start token, so the first event is predicted too and an empty history has a defined vector; time
enters as the logarithm of the gap to the previous event, in buckets (0 buckets turn it off); φ_in's unit vectors are
scaled by √width, so that they meet the residual stream at its own scale.

Shapes: B rows, N packed events, T packed tokens (events and start tokens), P predictions, M distinct items, D width,
E width of the concatenated tables.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.config import check
from tackboard.events.vocabulary import Vocabulary
from tackboard.models.backbone import Decoder
from tackboard.models.interface import LossOutput
from tackboard.models.losses import next_item_loss, row_of_event
from tackboard.models.tables import HashedTables

MAX_INVERSE_TEMPERATURE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinFMConfig:
    """Sizes of a PinFM; the defaults are for a laptop, the published tables are 8 × 80M rows × 32."""

    hashing: HashConfig = dataclasses.field(default_factory=HashConfig)
    """How item ids become rows of the sub-tables."""
    table_dim: int = 16
    """Width of one sub-table's row; an item's vector is num_hashes times as wide."""
    table_init_std: float = 0.1
    """Standard deviation of fresh table rows."""
    width: int = 64
    """Width of the decoder and of user and item vectors."""
    num_layers: int = 2
    """Decoder blocks."""
    num_heads: int = 2
    """Attention heads; must divide width."""
    mlp_ratio: int = 4
    """Width of a block's MLP over width."""
    max_history: int = 64
    """Events of a history that the model reads, the newest; longer training segments are refused."""
    num_time_buckets: int = 24
    """Buckets of log2(seconds since the previous event); 0 leaves time out."""
    request_features: tuple[str, ...] = ()
    """Features of the request (numbers, about -3 to 3) that are read beside the history; see docs/features.md."""
    dropout: float = 0.0
    """Share of activations dropped in training, 0 to below 1."""
    initial_temperature: float = 0.07
    """Where the learned temperature of the scores starts."""
    correct_popularity: bool = True
    """Divide each in-batch negative by its expected count (logQ correction)."""
    mask_same_user: bool = True
    """Take a user's own positives out of that user's negatives."""

    def __post_init__(self) -> None:
        for name in ("table_dim", "width", "num_layers", "num_heads", "mlp_ratio", "max_history"):
            check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        check(self.width % self.num_heads == 0, "model.num_heads", self.num_heads, f"a divisor of width {self.width}")
        check(0 <= self.num_time_buckets <= 64, "model.num_time_buckets", self.num_time_buckets, "0 to 64")
        distinct = len(set(self.request_features)) == len(self.request_features)
        check(distinct, "model.request_features", self.request_features, "each name once")
        check(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "0 to below 1")
        check(
            0.01 <= self.initial_temperature <= 10, "model.initial_temperature", self.initial_temperature, "0.01 to 10"
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The features the model reads."""
        gap = ("history.gap",) if self.num_time_buckets else ()
        return ("history.item", "history.action", "history.surface", *gap, *self.request_features)

    def build(self, vocabulary: Vocabulary) -> PinFM:
        """A PinFM with fresh parameters."""
        return PinFM(self, vocabulary)


class PinFM(nn.Module):
    """See the module's docstring."""

    def __init__(self, config: PinFMConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.item_tables = HashedTables(config.hashing, config.table_dim, config.table_init_std)
        event_width = self.item_tables.width
        self.actions = nn.Embedding(vocabulary.num_actions, event_width)
        self.surfaces = nn.Embedding(vocabulary.num_surfaces, event_width)
        self.time_gaps = nn.Embedding(max(1, config.num_time_buckets), event_width)
        for embedding in (self.actions, self.surfaces, self.time_gaps):
            nn.init.normal_(embedding.weight, std=config.table_init_std)
        self.start = nn.Parameter(torch.randn(config.width))
        self.phi_in = _mlp(event_width, config.width)
        self.phi_out = _mlp(config.width, config.width)
        self.psi = _mlp(event_width, config.width)
        self.decoder = Decoder(
            width=config.width,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            mlp_ratio=config.mlp_ratio,
            max_positions=config.max_history + 1,
            dropout=config.dropout,
        )
        num_features = len(config.request_features)
        self.request = nn.Linear(num_features, config.width, bias=False) if num_features else None
        self.log_inverse_temperature = nn.Parameter(torch.tensor(-math.log(config.initial_temperature)))

    def loss(self, batch: SequenceBatch) -> LossOutput:
        """InfoNCE of every positive event, predicted from what its user did before it."""
        items_ME = self.item_tables(batch.item_rows)
        hidden_TD = self._hidden(batch, items_ME)
        # The token before event n is number n + row: one start token for its own row and for each row before.
        before_N = torch.arange(batch.num_events, device=batch.items.device) + row_of_event(batch)
        hidden_PD = self._with_request(hidden_TD.index_select(0, before_N[batch.is_positive]), batch, batch.is_positive)
        loss = next_item_loss(
            self._project(hidden_PD),
            functional.normalize(self.psi(items_ME), dim=-1),
            batch,
            self._inverse_temperature(),
            correct_popularity=self.config.correct_popularity,
            mask_same_user=self.config.mask_same_user,
        )
        return LossOutput(loss, {"temperature": float(1.0 / self._inverse_temperature().detach())})

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """One unit vector per history [B, D]: the prediction of what comes after its last event."""
        hidden_TD = self._hidden(batch, self.item_tables(batch.item_rows))
        last_B = batch.offsets[1:] + torch.arange(batch.num_rows, device=batch.items.device)
        return self._project(self._with_request(hidden_TD.index_select(0, last_B), batch))

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        """One unit vector per item [M, D]."""
        return functional.normalize(self.psi(self.item_tables(item_rows)), dim=-1)

    def score(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Cosine over temperature [B, M]."""
        return (users @ items.T) * self._inverse_temperature()

    def _hidden(self, batch: SequenceBatch, items_ME: torch.Tensor) -> torch.Tensor:
        """Hidden vectors [N + B, D] of the packed tokens: each row's start token, then its events."""
        # embedding(), not indexing: its backward adds up in a fixed order, so a resumed run repeats every bit.
        events_NE = functional.embedding(batch.items, items_ME)
        events_NE = events_NE + self.actions(batch.actions) + self.surfaces(batch.surfaces)
        if self.config.num_time_buckets:
            last_bucket = self.config.num_time_buckets - 1
            events_NE = events_NE + self.time_gaps(batch.column("gap").clamp_max(last_bucket))
        events_ND = functional.normalize(self.phi_in(events_NE), dim=-1) * math.sqrt(self.config.width)
        rows_B = torch.arange(batch.num_rows, device=batch.items.device)
        places_N = torch.arange(batch.num_events, device=batch.items.device) + row_of_event(batch) + 1
        tokens_TD = events_ND.new_empty(batch.num_events + batch.num_rows, self.config.width)
        tokens_TD = tokens_TD.index_copy(0, batch.offsets[:-1] + rows_B, self.start.expand(batch.num_rows, -1))
        tokens_TD = tokens_TD.index_copy(0, places_N, events_ND)
        hidden: torch.Tensor = self.decoder(tokens_TD, batch.lengths() + 1)
        return hidden

    def _with_request(
        self, hidden_PD: torch.Tensor, batch: SequenceBatch, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds what the request says: its features [P], or those at the `chosen` ones of one per event."""
        if self.request is None:
            return hidden_PD
        features = torch.stack([batch.request[name].float() for name in self.config.request_features], dim=-1)
        return hidden_PD + self.request(features if chosen is None else features[chosen])

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.phi_out(hidden), dim=-1)

    def _inverse_temperature(self) -> torch.Tensor:
        return self.log_inverse_temperature.exp().clamp_max(MAX_INVERSE_TEMPERATURE)


def _mlp(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width_in, 2 * width_out), nn.GELU(approximate="tanh"), nn.Linear(2 * width_out, width_out)
    )
