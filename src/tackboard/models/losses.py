"""Computes InfoNCE, a loss that compares the right item with wrong items, the negatives.

The module takes hidden vectors of predictions, vectors of distinct items and the right item of each prediction. It
returns a loss per pair.

    loss = −log( e^s⁺ / (e^s⁺ + Σ w e^s) )                 s: cosine over temperature, w: weight of a negative

The negatives are the batch's own positives, items drawn uniformly from the catalogue, or both. An item that occurs c
times among n positives is in the sum once, with weight c. Popular items occur more often than in a uniform draw, so the
weight of each negative is also divided by its expected count. The expected count is n·q among the positives (q is the
item's share of all positives, counted or estimated) plus the chance of being drawn. This is the logQ correction for
both sources. The right item is always in the sum and is not corrected. If the whole catalogue is drawn and there are no
other negatives, all weights are 1 and the loss is the exact softmax. Items that a user engaged with are taken out of
that user's negatives, because a user who engaged with an item does not reject it. The right item is one of these items,
so all pairs of a token share one sum, and further targets of a token cost next to nothing. If only earlier items are
taken out, the user's later items stay negatives, so the loss also learns which item comes next. This needs one sum per
pair.

`ops.contrastive` computes the sums and never holds all scores of tokens × items in memory. On a GPU it holds a table of
users' own items: one byte for each user and item of the batch, or four bytes if only earlier items are taken out.

Shapes: P pairs, A tokens that predict something, R sums (one per token or per pair), M distinct items, D width, B rows,
G groups (users or rows), O positives.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from tackboard.batch import SequenceBatch
from tackboard.batch.padding import coarse_size, pad_to
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.models.targets import Pairs, next_token_pairs, row_of_event
from tackboard.ops.contrastive import ContrastivePairs, OwnItems, contrastive_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The targets of the loss, and their negatives."""

    initial_temperature: float = 0.07
    """Start value of the learned temperature of the scores."""
    in_batch_negatives: bool = True
    """Use the batch's other positives as negatives, in addition to data.uniform_negatives."""
    correct_popularity: bool = True
    """Divide the weight of each negative by its expected count (logQ correction)."""
    streaming_frequencies: bool = False
    """Estimate expected counts while training, instead of counting the dataset first. Useful for endless data."""
    mask_same_user: bool = True
    """Take a user's own positives out of that user's negatives."""
    later_negatives: bool = False
    """Keep a user's later positives among the negatives, so that the loss learns which item comes next."""
    multi_token_weight: float = 0.0
    """Weight of the multi-token loss, which predicts events beyond the next. The next-token loss has weight 1."""
    multi_token_window: int = 8
    """Largest distance, counted in events, from a token to an event that the multi-token loss predicts."""
    multi_token_share: float = 0.25
    """Share of the pairs of token and event in the window that a step uses, chosen at random."""
    future_token_weight: float = 0.0
    """Weight of the future-token loss, which predicts events after the first `future_token_anchor` of a segment."""
    future_token_anchor: int = 32
    """Number of events that the predicting token has read. Choose the history length that a downstream task reads."""
    future_token_window: int = 8
    """Number of events after the anchor that the future-token loss predicts."""

    def __post_init__(self) -> None:
        for name in ("multi_token_window", "future_token_anchor", "future_token_window"):
            check(getattr(self, name) >= 1, f"model.loss.{name}", getattr(self, name), "1 or more")
        for name in ("multi_token_weight", "future_token_weight"):
            check(getattr(self, name) >= 0, f"model.loss.{name}", getattr(self, name), "0 or more")
        share, temperature = self.multi_token_share, self.initial_temperature
        check(0.0 < share <= 1.0, "model.loss.multi_token_share", share, "above 0, up to 1")
        check(0.01 <= temperature <= 10, "model.loss.initial_temperature", temperature, "0.01 to 10")
        is_masked = self.mask_same_user or not self.later_negatives
        allowed = "false if mask_same_user is off, because then all later positives are negatives already"
        check(is_masked, "model.loss.later_negatives", True, allowed)
        is_used = not self.streaming_frequencies or (self.correct_popularity and self.in_batch_negatives)
        allowed = "false if correct_popularity or in_batch_negatives is off, because nothing would read the estimates"
        check(is_used, "model.loss.streaming_frequencies", True, allowed)


@dataclasses.dataclass(frozen=True)
class OwnLists:
    """Lists of items that are no negatives. Row b has the list items[offsets[g] : offsets[g + 1]] with g = groups[b].

    `places` holds the index of each item's event in its row. If set, only tokens after that event leave the item out.
    """

    offsets: torch.Tensor
    items: torch.Tensor
    groups: torch.Tensor
    places: torch.Tensor | None = None

    def padded(self, item: int) -> OwnLists:
        """Returns the lists of a padded batch with a last group of padding, which has `item` again and again.

        If each row is a group, then the last row is padding already. Otherwise no row has the groups that are added.
        """
        size, num_groups = coarse_size(len(self.items)), len(self.offsets) - 1
        num_groups = coarse_size(num_groups) if self.places is None else num_groups
        offsets = pad_to(self.offsets, num_groups + 1, len(self.items))
        offsets[-1] = size
        places = None if self.places is None else pad_to(self.places, size, 0)
        return OwnLists(offsets, pad_to(self.items, size, item), self.groups, places)


def same_user_items(batch: SequenceBatch) -> OwnLists:
    """Lists the positives of each user, in all rows of this batch."""
    users_G, group_of_row_B = torch.unique(batch.users, return_inverse=True)
    events_O = batch.is_positive.nonzero().squeeze(1)
    groups_O, order_O = torch.sort(group_of_row_B[row_of_event(batch)[events_O]], stable=True)
    edges_G = torch.arange(len(users_G) + 1, device=groups_O.device)
    return OwnLists(torch.searchsorted(groups_O, edges_G), batch.items[events_O[order_O]], group_of_row_B)


def earlier_items(batch: SequenceBatch) -> OwnLists:
    """Lists the positives of each row, with their indices within the row."""
    rows_N = row_of_event(batch)
    events_O = batch.is_positive.nonzero().squeeze(1)
    rows_O = rows_N[events_O]
    rows_B = torch.arange(batch.num_rows + 1, device=rows_N.device)
    places_O = events_O - batch.offsets[rows_O]
    return OwnLists(torch.searchsorted(rows_O, rows_B), batch.items[events_O], rows_B[:-1], places_O)


def positive_counts(batch: SequenceBatch) -> torch.Tensor:
    """Counts the positives of each distinct item in this batch [M]."""
    # Each event adds 1 or 0. Listing the positives first would make the host wait until the GPU knows their number.
    counts_M = torch.zeros(len(batch.item_ids), dtype=torch.int64, device=batch.items.device)
    return counts_M.index_add_(0, batch.items, batch.is_positive.long())


def negative_log_weights(
    batch: SequenceBatch,
    *,
    in_batch: bool = True,
    correct_popularity: bool = True,
    log_expected_M: torch.Tensor | None = None,
    counts_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns log w of each distinct item as a negative [M]; -inf if the item is no negative.

    `log_expected_M` is the log of an item's expected count among the batch's positives. If it is None,
    `batch.item_log_q` gives the expected count. `counts_M` is the result of `positive_counts`, if it is known. Raises
    ConfigError if the batch has no source of negatives.
    """
    if not in_batch and len(batch.sampled) == 0:
        raise ConfigError(
            "the loss has no negatives: model.loss.in_batch_negatives is off and the batch has no uniform ones",
            fix="--set data.uniform_negatives=1024, or --set model.loss.in_batch_negatives=true",
        )
    drawn_M = torch.zeros(len(batch.item_ids), device=batch.items.device).index_fill(0, batch.sampled, 1.0)
    if in_batch:
        drawn_M = drawn_M + (positive_counts(batch) if counts_M is None else counts_M)
    if not correct_popularity:
        return drawn_M.log()
    expected_M = batch.sample_rate.expand(len(drawn_M))
    if in_batch:
        if log_expected_M is None:
            log_expected_M = batch.item_log_q + batch.is_positive.sum().clamp_min(1).float().log()
        expected_M = expected_M + log_expected_M.exp()
    return drawn_M.log() - expected_M.log()


def info_nce(
    hidden_AD: torch.Tensor,
    items_MD: torch.Tensor,
    pairs: Pairs,
    weights_P: torch.Tensor,
    log_weights_M: torch.Tensor,
    own: OwnLists | None,
    seen_A: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted total of the pairs' losses, and the loss of each pair [P] without a gradient.

    `hidden_AD`, indexed by `pairs.tokens`, is already divided by the temperature. `own` lists the items that are no
    negatives. If `seen_A` is None, `own` comes from `same_user_items` and contains every right item. Otherwise `own`
    comes from `earlier_items`, `seen_A` is the number of events that each token has seen, and only items of these
    events are taken out. The right item of a pair is never its own negative.
    """
    if own is None or seen_A is not None:
        hidden_RD = functional.embedding(pairs.tokens, hidden_AD)
        sums_P = torch.arange(len(pairs), device=hidden_AD.device)
        rows_R, seen_R = pairs.rows, None if seen_A is None else seen_A.index_select(0, pairs.tokens)
    else:
        # All pairs of a token share its sum, because the token's own items contain all their right items.
        hidden_RD, sums_P, seen_R = hidden_AD, pairs.tokens, None
        rows_R = torch.zeros(len(hidden_AD), dtype=torch.int64, device=hidden_AD.device)
        rows_R = rows_R.index_copy(0, pairs.tokens, pairs.rows)
    asked = ContrastivePairs(sums_P, pairs.items, weights_P, is_left_out=hidden_RD is not hidden_AD)
    taken_out = None
    if own is not None:
        taken_out = OwnItems(own.offsets, own.items, own.groups.index_select(0, rows_R), own.places, seen_R)
    return contrastive_loss(hidden_RD, items_MD, log_weights_M, asked, taken_out)


def next_item_loss(
    hidden_PD: torch.Tensor,
    items_MD: torch.Tensor,
    batch: SequenceBatch,
    inverse_temperature: torch.Tensor,
    *,
    correct_popularity: bool,
    mask_same_user: bool,
) -> torch.Tensor:
    """Returns the mean InfoNCE of the batch's positive events; `hidden_PD` holds their predictions, in event order."""
    pairs = next_token_pairs(batch)
    order_P = torch.arange(len(pairs), device=hidden_PD.device)
    total, _ = info_nce(
        hidden_PD * inverse_temperature,
        items_MD,
        Pairs(tokens=order_P, items=pairs.items, rows=pairs.rows),
        torch.full((len(pairs),), 1.0 / max(1, len(pairs)), device=hidden_PD.device),
        negative_log_weights(batch, correct_popularity=correct_popularity),
        same_user_items(batch) if mask_same_user else None,
    )
    return total
