"""Computes the contrastive loss by its definition (see `contrastive`), in plain PyTorch with all scores in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from tackboard.ops.contrastive import ContrastivePairs, OwnItems

EXCLUDED = -1e4
"""The score of an item that is not a negative. A score of -inf would give NaN gradients if there are no negatives."""


def contrastive_loss(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses; see `contrastive.contrastive_loss`."""
    scores_RM = (hidden_RD @ items_MD.T).float() + log_weights_M
    if own is not None:
        own_GM = own_mask(own, len(items_MD))
        own_RM = own_GM.index_select(0, own.of_sum)
        is_own_RM = own_RM if own.seen is None else own_RM < own.seen[:, None]
        scores_RM = scores_RM.masked_fill(is_own_RM, EXCLUDED)
    if pairs.is_left_out:
        is_right_RM = torch.arange(len(items_MD), device=items_MD.device) == pairs.items[:, None]
        scores_RM = scores_RM.masked_fill(is_right_RM, EXCLUDED)
    return total_and_losses(torch.logsumexp(scores_RM, dim=1), hidden_RD, items_MD, pairs)


def total_and_losses(
    log_sums_R: torch.Tensor, hidden_RD: torch.Tensor, items_MD: torch.Tensor, pairs: ContrastivePairs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses of pairs whose sums are known. Autograd computes the gradients."""
    # Unlike indexing, embedding() adds up gradients in a fixed order on every device, so a resumed run repeats them.
    right_PD = functional.embedding(pairs.items, items_MD).float()
    hidden_PD = functional.embedding(pairs.sums, hidden_RD).float()
    log_sums_P = functional.embedding(pairs.sums, log_sums_R[:, None]).squeeze(1)
    losses_P = functional.softplus(log_sums_P - (hidden_PD * right_PD).sum(dim=-1))
    return (losses_P * pairs.weights).sum(), losses_P.detach()


def own_mask(own: OwnItems, num_items: int) -> torch.Tensor:
    """Returns a table [G, M] that says whether each group has each item (bool).

    With `places`, the table holds the item's smallest place in the group (int32), or 2³¹ - 1 if it is not there.
    """
    num_groups, num_own = len(own.offsets) - 1, len(own.items)
    groups_G = torch.arange(num_groups, device=own.items.device)
    groups_O = torch.repeat_interleave(groups_G, own.offsets.diff(), output_size=num_own)
    cells_O = groups_O * num_items + own.items
    if own.places is None:
        mask = torch.zeros(num_groups * num_items, dtype=torch.bool, device=own.items.device)
        return mask.index_fill_(0, cells_O, 1).view(num_groups, num_items)
    never = torch.iinfo(torch.int32).max
    table = torch.full((num_groups * num_items,), never, dtype=torch.int32, device=own.items.device)
    return table.scatter_reduce_(0, cells_O, own.places.int(), "amin").view(num_groups, num_items)
