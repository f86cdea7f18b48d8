"""InfoNCE over in-batch negatives: predict the next item among the items of the batch.

In: a hidden vector per prediction [P, D], the distinct items' vectors [M, D], which of them is right. Out: a scalar.

The negatives of a prediction are the batch's items. An item that occurs c times among n positives would stand in the
denominator c times; standing once with weight c is the same sum. Popular items occur more often than a uniform draw
would have them, so each negative is also divided by its expected count n·q (the logQ correction, q its share of the
training events); the right item is there by construction and is not corrected. Items that the same user engaged with
are taken out of that user's negatives: they are no evidence against themselves.

Shapes: P predictions, M distinct items, D width, B rows.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from tackboard.batch import SequenceBatch


def row_of_event(batch: SequenceBatch) -> torch.Tensor:
    """The row (history) of each event [N]."""
    rows = torch.arange(batch.num_rows, device=batch.offsets.device)
    return torch.repeat_interleave(rows, batch.lengths(), output_size=batch.num_events)


def same_user_items(batch: SequenceBatch) -> torch.Tensor:
    """bool [B, M]: whether item m is a positive of the user of row b, in any row of this batch."""
    _, user_of_row = torch.unique(batch.users, return_inverse=True)
    rows = row_of_event(batch)[batch.is_positive]
    engaged = torch.zeros(batch.num_rows, len(batch.item_ids), dtype=torch.bool, device=batch.items.device)
    engaged[user_of_row[rows], batch.items[batch.is_positive]] = True
    return engaged[user_of_row]


def log_count(batch: SequenceBatch) -> torch.Tensor:
    """log c of each distinct item [M], c its positives in this batch: -inf for an item that has none."""
    counts = torch.bincount(batch.items[batch.is_positive], minlength=len(batch.item_ids))
    return counts.float().log()


def log_expected_weight(batch: SequenceBatch) -> torch.Tensor:
    """log(c / (n·q)) of each distinct item [M]: its count over its expected count among n positives."""
    num_positives = max(1, int(batch.is_positive.sum()))
    return log_count(batch) - batch.item_log_q - math.log(num_positives)


def next_item_loss(
    hidden_PD: torch.Tensor,
    items_MD: torch.Tensor,
    batch: SequenceBatch,
    inverse_temperature: torch.Tensor,
    *,
    correct_popularity: bool,
    mask_same_user: bool,
) -> torch.Tensor:
    """Mean InfoNCE over the batch's positive events; `hidden_PD` holds their predictions, in event order."""
    targets_P = batch.items[batch.is_positive]
    bias_M = log_expected_weight(batch) if correct_popularity else log_count(batch)
    bias_BM = bias_M.expand(batch.num_rows, -1)
    if mask_same_user:
        bias_BM = bias_BM.masked_fill(same_user_items(batch), float("-inf"))
    # One additive bias says it all: log-weight of a negative, -inf where it is none, 0 at the right item.
    bias_PM = bias_BM.index_select(0, row_of_event(batch)[batch.is_positive])
    bias_PM.scatter_(1, targets_P[:, None], 0.0)
    logits_PM = torch.addmm(bias_PM, hidden_PD * inverse_temperature, items_MD.T)
    return functional.cross_entropy(logits_PM, targets_P)
