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


def log_expected_weight(batch: SequenceBatch) -> torch.Tensor:
    """log(c / (n·q)) of each distinct item [M]: -inf for an item that is no positive in this batch."""
    positives = batch.items[batch.is_positive]
    counts = torch.bincount(positives, minlength=len(batch.item_ids)).float()
    return counts.log() - batch.item_log_q - torch.log(torch.tensor(float(max(1, len(positives)))))


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
    logits_PM = (hidden_PD @ items_MD.T) * inverse_temperature
    weight_M = log_expected_weight(batch)
    if not correct_popularity:
        weight_M = weight_M + batch.item_log_q + torch.log(torch.tensor(float(max(1, len(targets_P)))))
    target_logit_P = logits_PM.gather(1, targets_P[:, None]).squeeze(1)
    negatives_PM = logits_PM + weight_M
    if mask_same_user:
        excluded_PM = same_user_items(batch)[row_of_event(batch)[batch.is_positive]]
    else:
        excluded_PM = functional.one_hot(targets_P, len(batch.item_ids)).bool()
    negatives_PM = negatives_PM.masked_fill(excluded_PM, float("-inf"))
    everything = torch.cat([target_logit_P[:, None], negatives_PM], dim=1)
    return (torch.logsumexp(everything, dim=1) - target_logit_P).mean()
