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

`with_targets` chooses the pairs of a batch and `loss_of_targets` computes their loss. PinFM and the rivals with PinFM's
loss (`sequential.py`) both call these two functions, so they have the same targets, masks, negatives and weights.

`ops.contrastive` computes the sums and never holds all scores of tokens × items in memory. On a GPU it holds a table of
users' own items: one byte for each user and item of the batch, or four bytes if only earlier items are taken out.

Shapes: P pairs, A tokens that predict something, R sums over negatives (one per token or per pair), M distinct items, D
width, B rows, G groups (users or rows), O positives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from tackboard.batch import SequenceBatch
from tackboard.batch.padding import coarse_size, pad_batch, pad_to, padded_size
from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.models.frequencies import SeenSlots, StreamingFrequencies
from tackboard.models.targets import (
    Pairs,
    future_token_pairs,
    join_pairs,
    multi_token_pairs,
    next_token_pairs,
    row_of_event,
)
from tackboard.ops.contrastive import ContrastivePairs, OwnItems, contrastive_loss

MAX_INVERSE_TEMPERATURE = 100.0


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
    """Share of the multi-token pairs (a token and an event in its window) that a step uses, chosen at random."""
    future_token_weight: float = 0.0
    """Weight of the future-token loss, which predicts events after a segment's first `future_token_anchor` events."""
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
    """Lists of items that are not negatives. Row b has the list items[offsets[g] : offsets[g + 1]] with g = groups[b].

    If `places` holds the index of each item's event in its row, the item is left out only for tokens after this event.
    """

    offsets: torch.Tensor
    items: torch.Tensor
    groups: torch.Tensor
    places: torch.Tensor | None = None

    def padded(self, item: int) -> OwnLists:
        """Returns the lists of a padded batch. The last group gets the padding, which repeats `item`.

        If each row is a group, then the last row is padding already. Otherwise the padding is in new groups, which
        belong to no row.
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
    """Returns log w of each distinct item as a negative [M]; -inf if the item is not a negative.

    `log_expected_M` is the log of an item's expected count among the batch's positives. If it is None,
    `batch.item_log_q` gives the expected count. `counts_M` is the result of `positive_counts`, if it is known. Raises
    ConfigError if the batch has no source of negatives.
    """
    if not in_batch and len(batch.sampled) == 0:
        raise ConfigError(
            "the loss has no negatives: model.loss.in_batch_negatives is off and no items were drawn for the batch",
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
            num_positives = batch.is_positive.sum() if counts_M is None else counts_M.sum()
            log_expected_M = batch.item_log_q + num_positives.clamp_min(1).float().log()
        expected_M = expected_M + log_expected_M.exp()
    return drawn_M.log() - expected_M.log()


def listed_negatives(batch: SequenceBatch, *, in_batch: bool) -> torch.Tensor | None:
    """Returns the items that may be negatives; None means all items of the batch."""
    return None if in_batch or len(batch.sampled) >= len(batch.item_ids) else batch.sampled


def info_nce(
    hidden_AD: torch.Tensor,
    items_MD: torch.Tensor,
    pairs: Pairs,
    weights_P: torch.Tensor,
    log_weights_M: torch.Tensor,
    own: OwnLists | None,
    seen_A: torch.Tensor | None = None,
    negatives: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted total of the pairs' losses, and the loss of each pair [P] without a gradient.

    `hidden_AD`, indexed by `pairs.tokens`, is already divided by the temperature. `own` lists the items that are not
    negatives. If `seen_A` is None, `own` comes from `same_user_items` and contains every right item. Otherwise `own`
    comes from `earlier_items`, `seen_A` is the number of events that each token has seen, and only items of these
    events are taken out. The right item of a pair is never a negative of this pair. `negatives` lists the items that
    may be negatives; None means all items.
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
    return contrastive_loss(hidden_RD, items_MD, log_weights_M, asked, taken_out, negatives)


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


# ---- the loss of a model with a learned temperature ----


class SharedItems(Protocol):
    """The items of all processes that compute a step together (`parallel.exchange`)."""

    pool: SequenceBatch
    """A batch with the items of all processes instead of the items of this process, and no events."""
    counts_G: torch.Tensor
    """Number of positives of each of these items."""
    totals: tuple[int, ...]
    """The sums, over all processes, of the numbers that each process gave to `ShareItems`."""

    def owned(self, items_ME: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the items whose vectors this process computes."""

    def gather(self, owned_OD: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of the items of all processes, given those that this process computed."""


ShareItems = Callable[[SequenceBatch, torch.Tensor, Sequence[int]], tuple[SequenceBatch, torch.Tensor, SharedItems]]
"""Takes a batch, the positives of each of its items, and numbers to be summed over the processes. Returns the batch
with only the items that its events read or that this process owns, the position of each item among the items of all
processes, and these items. All processes must call it for the same step."""


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the tokens of a batch predict, and which items are not negatives.

    The CPU computes these tensors before the batch is copied. If a GPU did, the host would have to wait for their
    lengths.
    """

    tokens: torch.Tensor
    """The tokens that predict something, ascending [A]."""
    rows: torch.Tensor
    """The row of each of these tokens [A]."""
    pairs: Pairs
    """The pairs of all losses; `pairs.tokens` are positions in `tokens`."""
    weights: torch.Tensor
    """The weight of each pair: the weight of its loss divided by the number of this loss's pairs [P]."""
    own: OwnLists | None
    """The items that are not negatives."""
    seen: torch.Tensor | None
    """Number of events that each token has seen [A], if only items of seen events are taken out."""
    counts: torch.Tensor
    """Number of positives of each distinct item [M], or of each item of all processes if `shared` is set."""
    slots: SeenSlots | None
    """What streaming frequencies observe, if the model has them."""
    layout: RowLayout
    """Where the rows of tokens lie."""
    parts: tuple[tuple[str, int], ...]
    """Name and number of pairs of each loss, in the order of the pairs."""
    part_of_pair: torch.Tensor
    """The index of the loss of each pair in `parts` [P]. Padding has the first index beyond `parts`."""
    shared: SharedItems | None = None
    """The items of all processes that compute this step together, if there are several. Then `pairs.items` and
    `own.items` are positions among these items."""

    def padded(self, num_items: int, event: int, row: int) -> Targets:
        """Returns the targets with padding: further tokens, pairs and own items, which have no weight.

        `event` is the first event that is padding, and `row` is its row. Added tokens and pairs point to the start
        token of this row and to the last item, which are padding too.
        """
        num_tokens, num_pairs = padded_size(len(self.tokens)), padded_size(len(self.pairs))
        return dataclasses.replace(
            self,
            tokens=pad_to(self.tokens, num_tokens, event + row),
            rows=pad_to(self.rows, num_tokens, row),
            pairs=self.pairs.padded(len(self.tokens), num_items - 1, row),
            weights=pad_to(self.weights, num_pairs, 0.0),
            own=None if self.own is None else self.own.padded(num_items - 1),
            seen=None if self.seen is None else pad_to(self.seen, num_tokens, 0),
            slots=None if self.slots is None else self.slots.padded(),
            part_of_pair=pad_to(self.part_of_pair, num_pairs, len(self.parts)),
        )


def with_targets(
    batch: SequenceBatch,
    config: LossConfig,
    generator: torch.Generator | None = None,
    *,
    has_start_tokens: bool = True,
    frequencies: StreamingFrequencies | None = None,
    share: ShareItems | None = None,
    pad: bool = False,
) -> SequenceBatch:
    """Returns the batch with the targets of all losses of `config`. `generator` draws the multi-token pairs.

    If several processes compute the step, `share` tells them about each other's items. The batch then keeps only some
    of its items (see `ShareItems`), and its number of examples is that of all processes.

    A model without start tokens has one token per event. Nothing then predicts the first event of a row, and the pairs
    of start tokens are left out. With `pad`, a batch with start tokens and its targets are padded to sizes that repeat.
    """
    assert has_start_tokens or not pad, "padding points to start tokens"
    num_events, num_rows = batch.num_events, batch.num_rows
    batch = pad_batch(batch) if pad else batch
    parts = [("next_token", 1.0, next_token_pairs(batch))]
    if config.multi_token_weight:
        pairs = multi_token_pairs(batch, config.multi_token_window, config.multi_token_share, generator)
        parts.append(("multi_token", config.multi_token_weight, pairs))
    if config.future_token_weight:
        pairs = future_token_pairs(batch, config.future_token_anchor, config.future_token_window)
        parts.append(("future_token", config.future_token_weight, pairs))
    if not has_start_tokens:
        parts = [(name, weight, _without_starts(batch, pairs)) for name, weight, pairs in parts]
    pairs = join_pairs([pairs for _, _, pairs in parts])
    tokens_A, of_pair_P = torch.unique(pairs.tokens, return_inverse=True)
    rows_A = torch.zeros_like(tokens_A).index_copy(0, of_pair_P, pairs.rows)
    own, seen_A = None, None
    if config.later_negatives:
        # Up to and including token t of row r, the batch has t - r events.
        own, seen_A = earlier_items(batch), tokens_A - rows_A - batch.offsets[rows_A]
    elif config.mask_same_user:
        own = same_user_items(batch)
    counts_M, shared = positive_counts(batch), None
    sizes, pool = [len(part) for _, _, part in parts], batch
    if share is not None:
        batch, place_M, shared = share(batch, counts_M, sizes)
        counts_M, sizes, pool = shared.counts_G, list(shared.totals), shared.pool
        pairs = dataclasses.replace(pairs, items=place_M[pairs.items])
        own = None if own is None else dataclasses.replace(own, items=place_M[own.items])
        object.__setattr__(batch, "num_examples_known", int(counts_M.sum()))
    weights = [
        torch.full((len(part),), weight / max(1, size)) for (_, weight, part), size in zip(parts, sizes, strict=True)
    ]
    targets = Targets(
        # Without start tokens, the token of event n has number n instead of n + row + 1.
        tokens=tokens_A if has_start_tokens else tokens_A - rows_A - 1,
        rows=rows_A,
        pairs=Pairs(tokens=of_pair_P, items=pairs.items, rows=pairs.rows),
        weights=torch.cat(weights).to(tokens_A.device),
        own=own,
        seen=seen_A,
        counts=counts_M,
        slots=None if frequencies is None else frequencies.seen_slots(pool.item_rows, counts_M),
        layout=RowLayout.of_lengths(batch.lengths() + int(has_start_tokens), coarse_size if pad else int),
        parts=tuple((name, len(part)) for name, _, part in parts),
        part_of_pair=torch.cat([torch.full((len(part),), n) for n, (_, _, part) in enumerate(parts)]).to(
            tokens_A.device
        ),
        shared=shared,
    )
    return batch.with_targets(targets.padded(len(batch.item_ids), num_events, num_rows) if pad else targets)


def _without_starts(batch: SequenceBatch, pairs: Pairs) -> Pairs:
    """Returns the pairs whose token is not a start token."""
    is_event_P = pairs.tokens > batch.offsets[pairs.rows] + pairs.rows
    return Pairs(pairs.tokens[is_event_P], pairs.items[is_event_P], pairs.rows[is_event_P])


def loss_of_targets(
    users_AD: torch.Tensor,
    items_MD: torch.Tensor,
    inverse_temperature: torch.Tensor,
    targets: Targets,
    log_weights_M: torch.Tensor,
    negatives: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
    """Returns the loss of all targets, and figures to log: the temperature, and each loss if there are several.

    `users_AD` (the predictions of `targets.tokens`) and `items_MD` hold unit vectors. `negatives` lists the items that
    may be negatives; None means all items.
    """
    total, losses_P = info_nce(
        users_AD * inverse_temperature,
        items_MD,
        targets.pairs,
        targets.weights,
        log_weights_M,
        targets.own,
        targets.seen,
        negatives,
    )
    metrics: dict[str, float | torch.Tensor] = {"temperature": 1.0 / inverse_temperature.detach()}
    if len(targets.parts) > 1:
        # The numbers of pairs differ from step to step. They are counted on the device, so that CUDA graphs work.
        numbers = torch.arange(len(targets.parts), device=losses_P.device)
        is_of_part = targets.part_of_pair == numbers[:, None]
        means = (is_of_part * losses_P).sum(dim=1) / is_of_part.sum(dim=1).clamp_min(1)
        metrics |= {f"loss_{name}": mean for (name, _), mean in zip(targets.parts, means, strict=True)}
    return total, metrics


@torch.no_grad()
def limit_temperature_(log_inverse_temperature: torch.Tensor) -> None:
    """Keeps a learned temperature at 1 / MAX_INVERSE_TEMPERATURE or more, in place.

    The parameter itself is clamped. If its exponential were clamped, the gradient there would be 0.
    """
    log_inverse_temperature.clamp_(max=math.log(MAX_INVERSE_TEMPERATURE))
