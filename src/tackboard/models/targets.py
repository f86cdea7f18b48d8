"""Chooses what the tokens of a history predict, as pairs of a token and a later event.

The module takes a batch and returns pairs. A row of n events has n + 1 tokens: a start token and one token for each
event. The token before an event has seen all earlier events and nothing of this event:

    events             a    b    c    d
    tokens       ▷    a    b    c    d
    next          ▷→a  a→b  b→c  c→d                    each positive event, from the token before it
    multi, 3      ▷→b  ▷→c  a→c  a→d  b→d               each positive event, from the two tokens before that token
    future, 2    a→b  a→c                               with anchor 1: the next 2 events, from the token after 1 event

Multi-token pairs look past the next event, so that the output vector of a token says what the user will want, not only
what comes next. There are many multi-token pairs, and a random share of them is enough. Future-token pairs use only one
token per row. This token should have read as many events as a downstream task will read. Decided: multi-token pairs
leave out the event right after the token, because the next-token loss predicts this event already. The published
multi-token loss predicts it too. Future-token pairs do include the event right after the token.

Shapes: P pairs, N packed events, T packed tokens, B rows. Packed event n, in row r, has the token at position n + r +
1.
"""

from __future__ import annotations

import dataclasses

import torch

from tackboard.batch import SequenceBatch
from tackboard.batch.padding import pad_to, padded_size


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Holds P pairs as three int64 tensors [P]. Each token of `tokens` predicts the item at the same place in `items`.

    `items` holds positions in the list of the batch's distinct items. `rows` holds the row (history) of each pair.
    """

    tokens: torch.Tensor
    items: torch.Tensor
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, token: int, item: int, row: int) -> Pairs:
        """Returns the pairs, followed by padding: pairs that all have this token, item and row."""
        size = padded_size(len(self))
        return Pairs(pad_to(self.tokens, size, token), pad_to(self.items, size, item), pad_to(self.rows, size, row))


def row_of_event(batch: SequenceBatch) -> torch.Tensor:
    """Returns the row (history) of each event [N]."""
    rows = torch.arange(batch.num_rows, device=batch.offsets.device)
    return torch.repeat_interleave(rows, batch.lengths(), output_size=batch.num_events)


@dataclasses.dataclass(frozen=True)
class TokenPlaces:
    """Holds positions of each row's start token [B] and last token [B], and of the token before each event [N]."""

    starts: torch.Tensor
    lasts: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, batch: SequenceBatch) -> TokenPlaces:
        rows_B = torch.arange(batch.num_rows, device=batch.offsets.device)
        events_N = torch.arange(batch.num_events, device=batch.offsets.device)
        return cls(batch.offsets[:-1] + rows_B, batch.offsets[1:] + rows_B, events_N + row_of_event(batch))

    @property
    def num_tokens(self) -> int:
        """The number T of tokens: one for each event, and a start token for each row."""
        return len(self.before) + len(self.starts)


def next_token_pairs(batch: SequenceBatch) -> Pairs:
    """Pairs every positive event with the token before it."""
    events_P = torch.nonzero(batch.is_positive).squeeze(1)
    return _pairs(batch, events_P, events_P)


def multi_token_pairs(
    batch: SequenceBatch, window: int, share: float = 1.0, generator: torch.Generator | None = None
) -> Pairs:
    """Pairs positive events with the tokens 2 to `window` places before them; returns a random `share` of the pairs.

    `generator` draws the share; None means torch's own generator of the batch's device.
    """
    places_N = torch.arange(batch.num_events, device=batch.items.device)
    positive_P = places_N[batch.is_positive]
    first_P = batch.offsets[:-1].index_select(0, row_of_event(batch)[batch.is_positive])
    lags = torch.arange(1, max(1, window), device=batch.items.device)
    before_PW = positive_P[:, None] - lags
    inside_PW = before_PW >= first_P[:, None]
    if share < 1.0:
        inside_PW = inside_PW & (torch.rand(inside_PW.shape, generator=generator, device=inside_PW.device) < share)
    return _pairs(batch, before_PW[inside_PW], positive_P[:, None].expand_as(before_PW)[inside_PW])


def future_token_pairs(batch: SequenceBatch, anchor: int, window: int) -> Pairs:
    """Pairs the token after the first `anchor` events of a row with the positives among the next `window` events."""
    rows_N = row_of_event(batch)
    places_N = torch.arange(batch.num_events, device=batch.items.device) - batch.offsets[:-1].index_select(0, rows_N)
    chosen_N = batch.is_positive & (places_N >= anchor) & (places_N < anchor + window)
    events_P = torch.nonzero(chosen_N).squeeze(1)
    return _pairs(batch, events_P - places_N[events_P] + anchor, events_P)


def join_pairs(parts: list[Pairs]) -> Pairs:
    """Joins the pairs of all parts, in the order of the parts."""
    return Pairs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "items", "rows")))


def _pairs(batch: SequenceBatch, before_P: torch.Tensor, events_P: torch.Tensor) -> Pairs:
    """Pairs the token before event `before_P` with the event `events_P` of the same row."""
    rows_P = row_of_event(batch).index_select(0, events_P)
    # Event n of row r has token n + r + 1, because rows 0 to r add r + 1 start tokens. The token before it is n + r.
    return Pairs(tokens=before_P + rows_P, items=batch.items.index_select(0, events_P), rows=rows_P)
