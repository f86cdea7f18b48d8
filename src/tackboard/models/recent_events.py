"""Reads a user's recent events together with a candidate, without any pretrained model (in the style of TransAct).

Each of the newest events becomes the sum of vectors of its item, action, surface and position. The vector of the
candidate is appended to each sum. A small transformer encoder reads these pairs. The output is the maximum of the
encoded events, followed by the newest few of them as they are. Everything is computed once per candidate, so the module
is small and reads few events. Rankers read users in this way before there were pretrained models of users.

Shapes: C candidates, U requests, S events, D width, E width of an item's rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import RequestBatch
from tackboard.core.config import check
from tackboard.core.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecentEventsConfig:
    """The settings of the ranker's own sequence module."""

    num_events: int = 0
    """Number of newest events that the module reads; 0 leaves the module out. The published ranker read 100."""
    width: int = 32
    """Width of an event, and of the candidate beside it."""
    num_layers: int = 2
    """Number of layers of the encoder."""
    num_kept: int = 4
    """Number of newest events whose outputs go to the head as they are, in addition to the maximum over all events."""

    def __post_init__(self) -> None:
        for name, least in (("num_events", 0), ("width", 2), ("num_layers", 1), ("num_kept", 0)):
            check(getattr(self, name) >= least, f"model.recent.{name}", getattr(self, name), f"{least} or more")
        check(self.width % 2 == 0, "model.recent.width", self.width, "an even number, because there are two heads")


class RecentEvents(nn.Module):
    """See the module's docstring."""

    def __init__(self, config: RecentEventsConfig, vocabulary: Vocabulary, item_width: int) -> None:
        super().__init__()
        self.config = config
        self.item = nn.Linear(item_width, config.width)
        self.actions = nn.Embedding(vocabulary.num_actions, config.width)
        self.surfaces = nn.Embedding(vocabulary.num_surfaces, config.width)
        self.places = nn.Embedding(config.num_events, config.width)
        layer = nn.TransformerEncoderLayer(2 * config.width, 2, 2 * config.width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)

    @property
    def width(self) -> int:
        """The number of outputs of each candidate."""
        return 2 * self.config.width * (1 + self.config.num_kept)

    def forward(self, batch: RequestBatch, items_ME: torch.Tensor, candidates_CE: torch.Tensor) -> torch.Tensor:
        """Returns one vector per candidate [C, width]; zeros for a user without events."""
        histories, num_events = batch.histories, self.config.num_events
        lengths_U = histories.lengths().clamp_max(num_events)
        ages_S = torch.arange(num_events, device=lengths_U.device)  # 0 is the newest event
        is_event_US = ages_S < lengths_U[:, None]
        places_US = (histories.offsets[1:, None] - 1 - ages_S).clamp_min(0)
        if not histories.num_events:
            return candidates_CE.new_zeros(len(candidates_CE), self.width)
        items_US = histories.items[places_US]
        events_USD = self.item(functional.embedding(items_US, items_ME)) + self.places(ages_S)
        events_USD = events_USD + self.actions(histories.actions[places_US])
        events_USD = events_USD + self.surfaces(histories.surfaces[places_US])
        candidates_CSD = self.item(candidates_CE)[:, None].expand(-1, num_events, -1)
        pairs_CSD = torch.cat([batch.expand(events_USD), candidates_CSD], dim=-1)
        is_event_CS = batch.expand(is_event_US)
        # A row of nothing but padding would give NaN. So its first place is read, and the output is dropped below.
        is_padding_CS = ~is_event_CS
        is_padding_CS[:, 0] = False
        read_CSD = self.encoder(pairs_CSD, src_key_padding_mask=is_padding_CS)
        kept_CKD = (read_CSD * is_event_CS[..., None])[:, : self.config.num_kept]
        kept_CKD = functional.pad(kept_CKD, (0, 0, 0, self.config.num_kept - kept_CKD.shape[1]))
        highest_CD = read_CSD.masked_fill(~is_event_CS[..., None], float("-inf")).amax(dim=1)
        highest_CD = torch.where(is_event_CS[:, :1], highest_CD, 0.0)
        return torch.cat([highest_CD, kept_CKD.flatten(1)], dim=1)
