"""InfoNCE is a loss that compares the right item with wrong items, the negatives.

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
taken out, the loss also learns that the next item was chosen before the later items, at the price of one sum per pair.

Sums are computed over blocks of tokens, and again in the backward pass (`in_blocks`), so memory does not grow with
tokens × items. The mask of users' own items does grow: it has a byte for each row and item, or four bytes with
`later_negatives`. On a GPU the items are padded to a multiple of 8 with items that are no negatives, because rows of
scores at unaligned addresses make matrix products slow.

Shapes: P pairs, A tokens that predict something, R sums (one per token or per pair), M distinct items, D width, B rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.batch import SequenceBatch
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.models.targets import Pairs, next_token_pairs, row_of_event

EXCLUDED = -1e4
"""The score of an item that is no negative. A score of -inf would give NaN gradients if there are no negatives."""
BLOCK_CELLS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Largest number of scores (tokens × items) that exist at one time: 128 MiB in fp32, or 512 MiB on a GPU."""
ALIGNED_ITEMS = 8
"""Number of half-precision numbers in 16 bytes. Matrix units of a GPU want rows to begin at multiples of 16 bytes."""


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
    """Estimate expected counts while training, instead of counting the dataset first: for data that never ends."""
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


def same_user_items(batch: SequenceBatch) -> torch.Tensor:
    """Returns bool [B, M]: whether item m is a positive of the user of row b, in any row of this batch."""
    _, user_of_row = torch.unique(batch.users, return_inverse=True)
    rows = row_of_event(batch)[batch.is_positive]
    engaged = torch.zeros(batch.num_rows, len(batch.item_ids), dtype=torch.bool, device=batch.items.device)
    engaged[user_of_row[rows], batch.items[batch.is_positive]] = True
    return engaged[user_of_row]


def first_places(batch: SequenceBatch) -> torch.Tensor:
    """Returns int32 [B, M]: the index within row b of the first positive event with item m; 2³¹ - 1 if none."""
    num_rows, num_items = batch.num_rows, len(batch.item_ids)
    rows_N = row_of_event(batch)
    places_N = (torch.arange(batch.num_events, device=rows_N.device) - batch.offsets[rows_N]).int()
    never = torch.full((num_rows * num_items,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=rows_N.device)
    cells_N = (rows_N * num_items + batch.items)[batch.is_positive]
    return never.scatter_reduce(0, cells_N, places_N[batch.is_positive], "amin").view(num_rows, num_items)


def positive_counts(batch: SequenceBatch) -> torch.Tensor:
    """Counts the positives of each distinct item in this batch [M]."""
    return torch.bincount(batch.items[batch.is_positive], minlength=len(batch.item_ids))


def negative_log_weights(
    batch: SequenceBatch,
    *,
    in_batch: bool = True,
    correct_popularity: bool = True,
    log_expected_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns log w of each distinct item as a negative [M]; -inf if the item is no negative.

    `log_expected_M` is the log of an item's expected count among the batch's positives. If it is None,
    `batch.item_log_q` gives the expected count. Raises ConfigError if the batch has no source of negatives.
    """
    if not in_batch and len(batch.sampled) == 0:
        raise ConfigError(
            "the loss has no negatives: model.loss.in_batch_negatives is off and the batch has no uniform ones",
            fix="--set data.uniform_negatives=1024, or --set model.loss.in_batch_negatives=true",
        )
    drawn_M = torch.zeros(len(batch.item_ids), device=batch.items.device).index_fill(0, batch.sampled, 1.0)
    counts_M = drawn_M + positive_counts(batch) if in_batch else drawn_M
    if not correct_popularity:
        return counts_M.log()
    expected_M = batch.sample_rate.expand(len(drawn_M))
    if in_batch:
        if log_expected_M is None:
            log_expected_M = batch.item_log_q + batch.is_positive.sum().clamp_min(1).float().log()
        expected_M = expected_M + log_expected_M.exp()
    return counts_M.log() - expected_M.log()


class LogSum(nn.Module):
    """Computes log Σ w e^s over the negatives of R predictions, without own items and without item `left_out_R`.

    The class has no parameters; it is a module so that it can be compiled. The compiled module makes one or two passes
    over the scores.
    """

    compiles = True

    def forward(
        self,
        items_MD: torch.Tensor,
        log_weights_M: torch.Tensor,
        own_items_BM: torch.Tensor | None,
        hidden_RD: torch.Tensor,
        own_rows_R: torch.Tensor | None,
        seen_R: torch.Tensor | None,
        left_out_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the sums [R]. `own_rows_R`: a token's row of `own_items_BM`; `seen_R`: how many events it saw."""
        scores_RM = (hidden_RD @ items_MD.T).float() + log_weights_M
        if own_items_BM is not None and own_rows_R is not None:
            own_RM = own_items_BM.index_select(0, own_rows_R)
            scores_RM = scores_RM.masked_fill(own_RM if seen_R is None else own_RM < seen_R[:, None], EXCLUDED)
        if left_out_R is not None:
            is_left_out_RM = torch.arange(len(items_MD), device=items_MD.device) == left_out_R[:, None]
            scores_RM = scores_RM.masked_fill(is_left_out_RM, EXCLUDED)
        return torch.logsumexp(scores_RM, dim=1)


def in_blocks(
    of_block: Callable[..., torch.Tensor],
    num_cells: int,
    shared: Sequence[torch.Tensor | None],
    of_rows: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Calls `of_block` block by block with `shared` and the block's part of `of_rows`; joins the results [R].

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


def info_nce(
    hidden_AD: torch.Tensor,
    items_MD: torch.Tensor,
    pairs: Pairs,
    log_weights_M: torch.Tensor,
    own_items_BM: torch.Tensor | None,
    seen_A: torch.Tensor | None = None,
    log_sum: nn.Module | None = None,
) -> torch.Tensor:
    """Returns the loss of each pair [P]. `hidden_AD`, indexed by `pairs.tokens`, is already divided by the temperature.

    `own_items_BM` says which items are no negatives of a row's tokens. Without `seen_A`, `own_items_BM` is the mask of
    `same_user_items`, which contains every right item. With `seen_A`, the number of events that each token has seen,
    `own_items_BM` comes from `first_places`, and items of the seen events are taken out. The right item of a pair is
    never its own negative. `log_sum` is a `LogSum`, which may be compiled.
    """
    log_sum = log_sum or LogSum()
    # Unlike indexing, embedding() adds up gradients in a fixed order, so a resumed run repeats every bit.
    right_PD = functional.embedding(pairs.items, items_MD).float()
    hidden_PD = functional.embedding(pairs.tokens, hidden_AD)
    own_rows_R = seen_R = left_out_R = None
    is_of_pairs = own_items_BM is None or seen_A is not None
    hidden_RD = hidden_PD if is_of_pairs else hidden_AD
    if is_of_pairs:
        left_out_R, own_rows_R = pairs.items, pairs.rows
        seen_R = None if seen_A is None else seen_A.index_select(0, pairs.tokens)
    else:
        own_rows_R = torch.zeros(len(hidden_AD), dtype=torch.int64, device=hidden_AD.device)
        own_rows_R = own_rows_R.index_copy(0, pairs.tokens, pairs.rows)
    log_weights_M = log_weights_M.clamp_min(EXCLUDED)
    missing = -len(items_MD) % ALIGNED_ITEMS if items_MD.is_cuda else 0
    if missing:
        items_MD = functional.pad(items_MD, (0, 0, 0, missing))
        log_weights_M = functional.pad(log_weights_M, (0, missing), value=EXCLUDED)
        own_items_BM = None if own_items_BM is None else functional.pad(own_items_BM, (0, missing))
    shared, of_rows = (items_MD, log_weights_M, own_items_BM), (hidden_RD, own_rows_R, seen_R, left_out_R)
    log_sums_R = in_blocks(log_sum, len(items_MD), shared, of_rows)
    log_sums_P = log_sums_R if is_of_pairs else log_sums_R.index_select(0, pairs.tokens)
    return functional.softplus(log_sums_P - (hidden_PD.float() * right_PD).sum(dim=-1))


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
    order = torch.arange(len(pairs), device=hidden_PD.device)
    return info_nce(
        hidden_PD * inverse_temperature,
        items_MD,
        Pairs(tokens=order, items=pairs.items, rows=pairs.rows),
        negative_log_weights(batch, correct_popularity=correct_popularity),
        same_user_items(batch) if mask_same_user else None,
    ).mean()
