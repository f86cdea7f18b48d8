"""Computes the contrastive loss, which compares the score of each right item with a weighted sum over negatives.

    loss of a pair = log(1 + Σ w e^s / e^s⁺) = softplus(log Σ w e^s − s⁺)          s = ⟨hidden, item⟩

The inputs are R hidden vectors, the vectors of M items, the log weight of each item as a negative, and P pairs. Each
hidden vector has one sum over its negatives. A pair belongs to one sum and has a right item (a positive) and a weight.
Several pairs may share a sum. The output is the weighted total of the losses, which has a gradient, and the loss of
each pair, which has none. If only some items are negatives, `negatives` lists them, and only their scores are computed.

Each implementation gets the vectors of K negatives and the vector of each pair's right item. There are three
implementations, and they have the same results:

    contrastive_reference   the definition, in plain PyTorch; holds all R × M scores
    contrastive_blocked     CPU, and a GPU without Triton: some sums at a time, gradients in the same pass
    contrastive_triton      GPU: the same, with one kernel for everything between the matrix products

Decided: the weights of pairs are an input and get no gradients. So the blocked implementation can compute the gradients
of a block while its scores are still in the cache. This takes three matrix products instead of four.

Shapes: R sums, M items, K negatives, D width, P pairs, G groups of own items, O own items of all groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import functional

from tackboard.core.errors import DataError
from tackboard.ops import contrastive_blocked, contrastive_reference


@dataclasses.dataclass(frozen=True)
class OwnItems:
    """Lists of items that are taken out of the negatives of certain sums, one list per group of sums.

    The list of group g is items[offsets[g] : offsets[g + 1]] and applies to every sum of the group.

    An item may occur more than once in a list. `of_sum` [R] names the group of each sum. `places[o]` is the index of
    own item o's event in its history, and `seen[r]` is the number of events that sum r has seen. If both are given,
    item o is taken out of sum r only if `places[o] < seen[r]`. So the loss keeps a user's later items as negatives.
    Implementations get `items` as positions among the K negatives. Position K means that the item is not a negative.
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
    the caller makes sure that its `OwnItems` contain, for every sum, the right items of all pairs of that sum.
    Implementations get positions among the K negatives as `items`.
    """

    sums: torch.Tensor
    items: torch.Tensor
    weights: torch.Tensor
    is_left_out: bool


Implementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ContrastivePairs, OwnItems | None],
    tuple[torch.Tensor, torch.Tensor],
]
"""Takes hidden vectors [R, D], negatives [K, D], right items [P, D], log weights [K], pairs and own items."""


def contrastive_loss(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None = None,
    negatives: torch.Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted total of the losses, and the loss of each pair [P] without a gradient.

    `negatives` lists the items that are negatives; an item that occurs twice counts once. None means all items. A log
    weight of -inf means that the item is not a negative. If there are no negatives, the loss of a pair is 0. By
    default, the fastest implementation is used.
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
    # Unlike indexing, embedding() adds up gradients in a fixed order on every device, so a resumed run repeats them.
    rights_PD = functional.embedding(pairs.items, items_MD)
    log_weights_K, negatives_KD = log_weights_M.clamp_min(contrastive_reference.EXCLUDED), items_MD
    if negatives is not None:
        numbers_K = torch.arange(len(negatives), device=negatives.device)
        places_M = torch.full((len(items_MD),), len(negatives), device=negatives.device)
        places_M.scatter_reduce_(0, negatives, numbers_K, "amin")
        is_first_K = places_M.index_select(0, negatives) == numbers_K
        log_weights_K = log_weights_K.index_select(0, negatives)
        log_weights_K = log_weights_K.masked_fill(~is_first_K, contrastive_reference.EXCLUDED)
        negatives_KD = functional.embedding(negatives, items_MD)
        pairs = dataclasses.replace(pairs, items=places_M.index_select(0, pairs.items))
        own = None if own is None else dataclasses.replace(own, items=places_M.index_select(0, own.items))
    implementation = choose(hidden_RD) if implementation is None else implementation
    return implementation(hidden_RD, negatives_KD, rights_PD, log_weights_K, pairs, own)


def choose(hidden_RD: torch.Tensor) -> Implementation:
    """Returns the fastest implementation for these vectors."""
    if hidden_RD.is_cuda and find_spec("triton") is not None:
        from tackboard.ops import contrastive_triton

        return contrastive_triton.contrastive_loss
    return contrastive_blocked.contrastive_loss
