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
    negatives_KD: torch.Tensor,
    rights_PD: torch.Tensor,
    log_weights_K: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses; see `contrastive.Implementation`."""
    scores_RK = (hidden_RD @ negatives_KD.T).float() + log_weights_K
    if own is not None:
        own_RK = own_mask(own, len(negatives_KD)).index_select(0, own.of_sum)
        is_own_RK = own_RK if own.seen is None else own_RK < own.seen[:, None]
        scores_RK = scores_RK.masked_fill(is_own_RK, EXCLUDED)
    if pairs.is_left_out:
        is_right_RK = torch.arange(len(negatives_KD), device=negatives_KD.device) == pairs.items[:, None]
        scores_RK = scores_RK.masked_fill(is_right_RK, EXCLUDED)
    log_sums_R = torch.logsumexp(scores_RK, dim=1)
    hidden_PD = functional.embedding(pairs.sums, hidden_RD).float()
    log_sums_P = functional.embedding(pairs.sums, log_sums_R[:, None]).squeeze(1)
    losses_P = functional.softplus(log_sums_P - (hidden_PD * rights_PD.float()).sum(dim=-1))
    return (losses_P * pairs.weights).sum(), losses_P.detach()


def own_mask(own: OwnItems, num_negatives: int) -> torch.Tensor:
    """Returns a matrix [G, K] that says whether each group has each negative (bool).

    With `places`, the matrix holds the item's smallest place in the group (int32), or 2³¹ - 1 if the group lacks it.
    """
    num_groups, num_own = len(own.offsets) - 1, len(own.items)
    groups_O = torch.repeat_interleave(
        torch.arange(num_groups, device=own.items.device), own.offsets.diff(), output_size=num_own
    )
    num_cells = num_groups * num_negatives
    # Items that are not negatives go to one cell after the matrix.
    cells_O = (groups_O * num_negatives + own.items).masked_fill(own.items == num_negatives, num_cells)
    if own.places is None:
        cells = torch.zeros(num_cells + 1, dtype=torch.bool, device=own.items.device).index_fill_(0, cells_O, 1)
    else:
        cells = torch.full((num_cells + 1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=own.items.device)
        cells.scatter_reduce_(0, cells_O, own.places.int(), "amin")
    return cells[:-1].view(num_groups, num_negatives)
