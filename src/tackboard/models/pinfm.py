"""PinFM is a causal model of all user activity. At the published size nearly all parameters are in hashed tables.

The model takes a batch of histories. It returns a loss, or vectors of histories and items whose product is the score.

    event = item tables + action + surface + time gap  ─ φ_in ─►  backbone  ─ φ_out ─►  H   (a unit vector)
    item  = item tables                                ─────────── ψ ───────────────►  z   (a unit vector)
    score = ⟨H, z⟩ / temperature

φ_in, φ_out and ψ are pointwise MLPs, or MLPs with a residual, followed by an L2 norm. Decided, because PinFM's paper
does not say: each history begins with a learned start token, so the first event is also predicted and an empty history
has a defined vector. Time enters as the logarithm of the gap to the previous event, in buckets (0 buckets leave time
out). φ_in's unit vectors are scaled by √width to fit the scale of the residual stream. With `request_time` a token also
knows the time to the event that it predicts. In training this is the gap before the next event; in a request it is the
time since the newest event. A token knows nothing else about the future. A server knows this time too, because it knows
when a request is made.

Shapes: B rows, N packed events, T packed tokens (events and start tokens), P predictions, M distinct items, D width,
E width of the concatenated tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import RequestBatch, SequenceBatch
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import SINCE_LAST, Vocabulary
from tackboard.models.backbone import BackboneConfig, without_unread
from tackboard.models.frequencies import StreamingFrequencies
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel
from tackboard.models.losses import (
    MAX_INVERSE_TEMPERATURE,
    LossConfig,
    ShareItems,
    Targets,
    limit_temperature_,
    listed_negatives,
    loss_of_targets,
    negative_log_weights,
    with_targets,
)
from tackboard.models.tables import HashedTables
from tackboard.models.targets import TokenPlaces
from tackboard.models.time_encoding import log2_bucket
from tackboard.ops.packed_attention import HAS_TRITON, MAX_HEAD_BYTES

FREQUENCY_HASHES = 2
"""Number of hash functions of streaming frequencies. They are the hash functions of the first sub-tables."""
MAPS = ("mlp", "residual")
FLAT_BACKBONE = ("num_layers", "num_heads", "mlp_ratio", "positions", "time_bias")
FLAT_LOSS = (
    *("initial_temperature", "in_batch_negatives", "correct_popularity", "streaming_frequencies", "mask_same_user"),
    *("later_negatives", "multi_token_weight", "multi_token_window", "multi_token_share"),
    *("future_token_weight", "future_token_anchor", "future_token_window"),
)
"""Settings that older versions stored under `model` itself. FLAT_BACKBONE is now in `backbone`, FLAT_LOSS in `loss`."""
RESIDUAL_SCALE = 0.1
"""Factor of the last layer of a fresh residual map. It makes the output of a fresh map close to the input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinFMConfig(ModelConfig):
    """The settings of a PinFM. The defaults are for a laptop; the published model has 8 tables of 80M rows × 32."""

    moved_settings: ClassVar[Mapping[str, str]] = {
        **ModelConfig.moved_settings,
        **{f"table_{name}": f"tables.{name}" for name in ("dim", "init_std", "storage")},
        "backbone": "backbone.kind",
        **{name: f"backbone.{name}" for name in FLAT_BACKBONE},
        **{name: f"loss.{name}" for name in FLAT_LOSS},
    }

    width: int = 64
    """Width of the backbone and of user and item vectors."""
    maps: str = "mlp"
    """Form of φ_in, φ_out and ψ: `mlp`, or `residual`, which adds an MLP of the input to the input. With `residual`
    the maps hardly change their inputs at first, and tables.num_hashes × tables.dim must equal width."""
    num_positions: int = 0
    """Number of learned positions, for start token and events; 0 means max_history + 1. A model that starts from a
    trained run needs as many positions as the run has, even if it reads shorter histories."""
    num_time_buckets: int = 24
    """Number of buckets of log2(seconds since the previous event); 0 leaves time out."""
    request_time: bool = False
    """Whether tokens know the time from their event to the event that they predict, or to the request."""
    request_features: tuple[str, ...] = ()
    """Features of the request (numbers of about -3 to 3) that the model reads in addition to the history. See
    docs/features.md."""
    dropout: float = 0.0
    """Share of activations that training drops, in the tokens and in the backbone; 0 to below 1."""
    backbone: BackboneConfig = dataclasses.field(default_factory=BackboneConfig)
    """The layers between φ_in and φ_out."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """The targets of the loss, and their negatives."""

    def __post_init__(self) -> None:
        for name in ("width", "max_history"):
            check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        fits = self.num_positions == 0 or self.num_positions > self.max_history
        check(fits, "model.num_positions", self.num_positions, f"0, or {self.max_history + 1} and more")
        check(self.maps in MAPS, "model.maps", self.maps, ", ".join(MAPS))
        has_buckets = not self.request_time or self.num_time_buckets > 0
        check(has_buckets, "model.request_time", True, "false if model.num_time_buckets is 0")
        tables, anchor = self.tables, self.loss.future_token_anchor
        if self.maps == "residual" and tables.num_hashes * tables.dim != self.width:
            dim, rest = divmod(self.width, tables.num_hashes)
            raise ConfigError(
                f"model.width is {self.width}, but the tables have {tables.num_hashes} × {tables.dim}",
                allowed="residual maps need tables that are together as wide as the model",
                fix="--set model.maps=mlp" if rest else f"--set model.tables.dim={dim}, or --set model.maps=mlp",
            )
        reaches = self.loss.future_token_weight == 0 or anchor < self.max_history
        check(reaches, "model.loss.future_token_anchor", anchor, f"below max_history {self.max_history}")
        self.backbone.check_width(self.width)
        check(0 <= self.num_time_buckets <= 64, "model.num_time_buckets", self.num_time_buckets, "0 to 64")
        distinct = len(set(self.request_features)) == len(self.request_features)
        check(distinct, "model.request_features", self.request_features, "each name once")
        check(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "0 to below 1")

    @classmethod
    def from_stored(cls, values: Any) -> Self:
        return super().from_stored(without_unread(values, "gpt"))

    @property
    def reads(self) -> tuple[str, ...]:
        gap = ("history.gap",) if self.num_time_buckets else ()
        time = ("history.time",) if self.backbone.reads_times else ()
        asked = (SINCE_LAST,) if self.request_time else ()
        return ("history.item", "history.action", "history.surface", *gap, *time, *asked, *self.request_features)

    @property
    def max_positions(self) -> int:
        """The largest number of tokens of a row."""
        return self.num_positions or self.max_history + 1

    @property
    def needs_drawn_negatives(self) -> bool:
        return not self.loss.in_batch_negatives

    @property
    def least_max_length(self) -> int:
        return self.loss.future_token_anchor + 1 if self.loss.future_token_weight else 2

    @property
    def meaning_of_scores(self) -> str:
        return (
            "A score is the cosine of a user's and an item's vector, divided by the temperature. Scores rank "
            "candidates for one user; they are not probabilities and not comparable between versions."
        )

    def warnings(self, max_length: int) -> list[str]:
        if self.backbone.positions != "learned" or self.max_history <= max_length:
            return []
        return [
            f"positions beyond data.max_length = {max_length} are read but never trained: "
            "raise data.max_length to model.max_history, or --set model.backbone.positions=rotary"
        ]

    def serving(self) -> Self:
        return dataclasses.replace(self, loss=dataclasses.replace(self.loss, streaming_frequencies=False))

    def build(self, vocabulary: Vocabulary) -> PinFM:
        return PinFM(self, vocabulary)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of histories before the backbone, and their times in ms if the backbone reads times."""

    x_TD: torch.Tensor
    times_T: torch.Tensor | None
    """The time of each token as a key."""
    asked_T: torch.Tensor | None
    """The time of each token as a query; None means its time as a key."""


class PinFM(RetrievalModel):
    """See the module's docstring."""

    can_pad: ClassVar[bool] = True

    @property
    def can_replay(self) -> bool:
        """Whether a CUDA graph may replay a step: our attention kernels allow it, padded grids do not."""
        return HAS_TRITON and 4 * self.config.width // self.config.backbone.num_heads <= MAX_HEAD_BYTES

    def __init__(self, config: PinFMConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.item_tables = HashedTables(config.tables)
        event_width = self.item_tables.width
        self.actions = nn.Embedding(vocabulary.num_actions, event_width)
        self.surfaces = nn.Embedding(vocabulary.num_surfaces, event_width)
        self.time_gaps = nn.Embedding(max(1, config.num_time_buckets), event_width)
        for embedding in (self.actions, self.surfaces, self.time_gaps):
            nn.init.normal_(embedding.weight, std=config.tables.init_std)
        self.start = nn.Parameter(torch.randn(config.width))
        make = _Residual if config.maps == "residual" else _mlp
        self.phi_in = make(event_width, config.width)
        self.phi_out = make(config.width, config.width)
        self.psi = make(event_width, config.width)
        self.decoder = config.backbone.build(
            width=config.width, max_positions=config.max_positions, dropout=config.dropout
        )
        self.request_gaps = None
        if config.request_time:
            self.request_gaps = nn.Embedding(config.num_time_buckets + 1, config.width)
            nn.init.normal_(self.request_gaps.weight, std=0.02)
        self.frequencies = None
        if config.loss.streaming_frequencies:
            num_hashes = min(FREQUENCY_HASHES, config.tables.num_hashes)
            self.frequencies = StreamingFrequencies(num_hashes, config.tables.num_rows)
        num_features = len(config.request_features)
        self.request = nn.Linear(num_features, config.width, bias=False) if num_features else None
        self.log_inverse_temperature = nn.Parameter(torch.tensor(-math.log(config.loss.initial_temperature)))
        self.share_items: ShareItems | None = None
        """How the processes that compute a step together learn each other's items; None if there is one process."""

    def loss(self, batch: SequenceBatch) -> LossOutput:
        """Returns the InfoNCE loss of positive events, predicted from earlier events of the user; see `targets`."""
        batch = self.prepare(batch) if batch.targets is None else batch
        items_ME = self.item_tables(batch.item_rows)
        return self.loss_of_hidden(batch, self._hidden(batch, items_ME), items_ME)

    def loss_of_hidden(
        self, batch: SequenceBatch, hidden_TD: torch.Tensor, items_ME: torch.Tensor, *, has_requests: bool = True
    ) -> LossOutput:
        """Returns the loss of a batch with targets, given the hidden vectors of its tokens and the rows of its items.

        `has_requests` says whether the batch has the features of a request for each event.
        """
        if self.training:
            limit_temperature_(self.log_inverse_temperature)
        targets: Targets = batch.targets
        hidden_AD = hidden_TD.index_select(0, targets.tokens)
        if has_requests:
            # The event after token t of row r has number t - r. The token reads the request features of that event.
            hidden_AD = self.with_request(hidden_AD, batch, targets.tokens - targets.rows)
        users_AD, shared, pool = self.project_users(hidden_AD), targets.shared, batch
        if shared is None:
            items_MD = self.project_items(items_ME)
        else:
            items_MD, pool = shared.gather(self.project_items(shared.owned(items_ME))), shared.pool
        if batch.num_padding:
            # Padding has weight 0. But the highest score is subtracted from all scores before their exponentials are
            # taken. A high score of a padding item would make all exponentials vanish, so its vector is set to 0.
            items_MD = items_MD.masked_fill(batch.item_rows[:, :1] < 0, 0.0)
        log_weights_M = self._log_weights(pool, targets)
        negatives = listed_negatives(pool, in_batch=self.config.loss.in_batch_negatives)
        temperature = self._inverse_temperature()
        return LossOutput(*loss_of_targets(users_AD, items_MD, temperature, targets, log_weights_M, negatives))

    def prepare(
        self, batch: SequenceBatch, generator: torch.Generator | None = None, *, pad: bool = False
    ) -> SequenceBatch:
        """Returns the batch with its targets, which need no parameters. `generator` draws the multi-token pairs.

        With `pad`, the batch and its targets are padded to sizes that repeat. The loss stays the same.
        """
        return with_targets(
            batch, self.config.loss, generator, frequencies=self.frequencies, share=self.share_items, pad=pad
        )

    def _log_weights(self, batch: SequenceBatch, targets: Targets) -> torch.Tensor:
        log_expected_M = None
        if self.frequencies is not None:
            if self.training and targets.slots is not None:
                self.frequencies.observe(targets.slots)
            log_expected_M = self.frequencies.log_expected(batch.item_rows)
        return negative_log_weights(
            batch,
            in_batch=self.config.loss.in_batch_negatives,
            correct_popularity=self.config.loss.correct_popularity,
            log_expected_M=log_expected_M,
            counts_M=targets.counts,
        )

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        """Returns one unit vector per history [B, D]: the prediction of the event after its last event."""
        return self.encode_requests(batch)[1]

    def encode_requests(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden vector after the last event of each history [B, D], and the user's unit vectors [B, D]."""
        since_last_B = batch.of_request(SINCE_LAST) if self.config.request_time else None
        hidden_TD = self._hidden(batch, self.item_tables(batch.item_rows), since_last_B)
        hidden_BD = self.with_request(hidden_TD.index_select(0, TokenPlaces.of(batch).lasts), batch)
        return hidden_BD, self.project_users(hidden_BD)

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        return self.project_items(self.item_tables(item_rows))

    def project_items(self, items_ME: torch.Tensor) -> torch.Tensor:
        """Returns one unit vector per item [M, D], from the concatenated rows of the tables."""
        return functional.normalize(self.psi(items_ME), dim=-1)

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns cosines divided by the temperature [C]."""
        return super().scores(batch) * self._inverse_temperature().clamp_max(MAX_INVERSE_TEMPERATURE)

    def _hidden(
        self, batch: SequenceBatch, items_ME: torch.Tensor, since_last_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the hidden vectors [N + B, D] of the tokens that `tokens_of` returns."""
        tokens = self.tokens_of(batch, items_ME, since_last_B)
        layout = None if batch.targets is None else batch.targets.layout
        hidden: torch.Tensor = self.decoder(tokens.x_TD, batch.lengths() + 1, tokens.times_T, tokens.asked_T, layout)
        return hidden

    def tokens_of(self, batch: SequenceBatch, items_ME: torch.Tensor, since_last_B: torch.Tensor | None) -> Tokens:
        """Returns what the backbone reads [N + B]: each row's start token, then its events, with their times.

        `since_last_B` holds the seconds from each row's newest event to its request, or is None without requests.
        """
        # Unlike indexing, embedding() adds up gradients in a fixed order, so a resumed run repeats every bit.
        events_NE = functional.embedding(batch.items, items_ME)
        events_NE = events_NE + self.actions(batch.actions) + self.surfaces(batch.surfaces)
        if self.config.num_time_buckets:
            last_bucket = self.config.num_time_buckets - 1
            events_NE = events_NE + self.time_gaps(batch.column("gap").clamp_max(last_bucket))
        events_ND = self.enter(events_NE)
        places = TokenPlaces.of(batch)
        tokens_TD = events_ND.new_empty(places.num_tokens, self.config.width)
        tokens_TD = tokens_TD.index_copy(0, places.starts, self.start.expand(batch.num_rows, -1))
        tokens_TD = tokens_TD.index_copy(0, places.before + 1, events_ND)
        if self.request_gaps is not None:
            tokens_TD = tokens_TD + self.request_gaps(self._gaps_ahead(batch, places, since_last_B))
        tokens_TD = functional.dropout(tokens_TD, self.config.dropout, self.training)
        if not self.config.backbone.reads_times:
            return Tokens(tokens_TD, None, None)
        return Tokens(tokens_TD, *self._times(batch, places, since_last_B))

    def enter(self, events_NE: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of events [N, D], from the sums of their embeddings."""
        return functional.normalize(self.phi_in(events_NE), dim=-1) * math.sqrt(self.config.width)

    def _gaps_ahead(self, batch: SequenceBatch, places: TokenPlaces, since_last_B: torch.Tensor | None) -> torch.Tensor:
        """Returns the bucket of the time from each token to the event that it predicts, or to the request [T].

        Bucket `num_time_buckets` means that the time is unknown. Start tokens get this bucket, because a segment does
        not contain the user's earlier events.
        """
        num_buckets = self.config.num_time_buckets
        gaps_T = torch.full((places.num_tokens,), num_buckets, device=batch.items.device)
        gaps_T[places.before] = batch.column("gap").clamp_max(num_buckets - 1)
        if since_last_B is not None:
            # A request with a time before its newest event is in bucket 0, as if no time had passed.
            gaps_T[places.lasts] = log2_bucket(since_last_B, num_buckets)
        # Assigning a number by index would copy it to the device, and the host would wait.
        return gaps_T.index_fill_(0, places.starts, num_buckets)

    def _times(
        self, batch: SequenceBatch, places: TokenPlaces, since_last_B: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the times of tokens as keys and as queries [T] in ms. A start token has its next event's time."""
        times_T = torch.zeros(places.num_tokens, dtype=torch.int64, device=batch.items.device)
        # An event's time is first written to the token before the event. Then every event's own token gets its own
        # time. So only start tokens keep the time of the event after them.
        times_T[places.before] = batch.times_ms
        times_T[places.before + 1] = batch.times_ms
        if not self.config.request_time:
            return times_T, None
        asked_T = times_T.clone()
        asked_T[places.before] = batch.times_ms
        if since_last_B is not None:
            since_ms_B = (since_last_B.double().clamp_min(0) * 1000).round().long()
            asked_T[places.lasts] = times_T[places.lasts] + since_ms_B
        return times_T, asked_T

    def with_request(
        self, hidden_PD: torch.Tensor, batch: SequenceBatch, events_P: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds the projected features of requests to hidden vectors. With `events_P`, these events are the requests."""
        if self.request is None:
            return hidden_PD
        features = torch.stack([batch.of_request(name).float() for name in self.config.request_features], dim=-1)
        return hidden_PD + self.request(features if events_P is None else features[events_P])

    def project_users(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.phi_out(hidden), dim=-1)

    def _inverse_temperature(self) -> torch.Tensor:
        return self.log_inverse_temperature.exp()


class _Residual(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.mlp = _mlp(width_in, width_out)
        with torch.no_grad():
            for parameter in self.mlp[-1].parameters():
                parameter.mul_(RESIDUAL_SCALE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def _mlp(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width_in, 2 * width_out), nn.GELU(approximate="tanh"), nn.Linear(2 * width_out, width_out)
    )
