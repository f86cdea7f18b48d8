"""Computes the contrastive loss, which compares the score of each right item with a weighted sum over negatives.

    loss of a pair = log(1 + Σ w e^s / e^s⁺) = softplus(log Σ w e^s − s⁺)          s = ⟨hidden, item⟩

The inputs are R hidden vectors, the vectors of M items, the log weight of each item as a negative, and P pairs. Each
hidden vector has one sum over its negatives. A pair belongs to one sum and has a right item (a positive) and a weight.
Several pairs may share a sum. The output is the weighted total of the losses, which has a gradient, and the loss of
each pair, which has none.

There are three implementations with the same results:

    contrastive_reference   the definition, in plain PyTorch; holds all R × M scores
    contrastive_blocked     CPU, and a GPU without Triton: some sums at a time, gradients in the same pass
    contrastive_triton      GPU: the same, with one kernel for everything between the matrix products

Decided: the weights of pairs are an input and get no gradients. So the blocked implementation can compute the gradients
of a block while its scores are still in the cache. This takes three matrix products instead of four.

Shapes: R sums, M items, D width, P pairs, G groups of own items, O own items of all groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec

import torch

from tackboard.core.errors import DataError
from tackboard.ops import contrastive_blocked, contrastive_reference

@dataclasses.dataclass(frozen=True)
class OwnItems:
    """Items that are not negatives of some sums, as lists per group: group g has items[offsets[g] : offsets[g + 1]].

    An item may occur more than once in a list. `of_sum` [R] names the group of each sum. With `places`, item o is taken
    out of sum r only if `places[o] < seen[r]`. So the loss keeps a user's later items as negatives.
    """

    offsets: torch.Tensor
    items: torch.Tensor
    of_sum: torch.Tensor
    places: torch.Tensor | None = None
    seen: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ContrastivePairs:
    """P pairs: pair p belongs to sum `sums[p]`, has the right item `items[p]` and the weight `weights[p]`.

    If `is_left_out`, there is one pair per sum in the same order, and the right item is taken out of its sum. Otherwise
    the caller's own items contain every right item.
    """

    sums: torch.Tensor
    items: torch.Tensor
    weights: torch.Tensor
    is_left_out: bool


Implementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ContrastivePairs, OwnItems | None], tuple[torch.Tensor, torch.Tensor]
]


def contrastive_loss(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted total of the losses, and the loss of each pair [P] without a gradient.

    A log weight of -inf means that the item is not a negative. If there are no negatives, the loss of a pair is 0.
    """
    if hidden_RD.dim() != 2 or items_MD.dim() != 2 or hidden_RD.shape[1] != items_MD.shape[1]:
        raise DataError(
            f"hidden vectors have shape {tuple(hidden_RD.shape)} and items have shape {tuple(items_MD.shape)}",
            allowed="allowed: [R, D] and [M, D]",
        )
    if pairs.is_left_out and len(pairs.sums) != len(hidden_RD):
        raise DataError(
            f"there are {len(pairs.sums)} pairs and {len(hidden_RD)} sums", allowed="allowed: one pair per sum"
        )
    log_weights_M = log_weights_M.clamp_min(contrastive_reference.EXCLUDED)
    return choose(hidden_RD)(hidden_RD, items_MD, log_weights_M, pairs, own)


def choose(hidden_RD: torch.Tensor) -> Implementation:
    """Returns the fastest implementation for these vectors."""
    if hidden_RD.is_cuda and find_spec("triton") is not None:
        from tackboard.ops import contrastive_triton

        return contrastive_triton.contrastive_loss
    return contrastive_blocked.contrastive_loss
