"""Computes the contrastive loss (see `contrastive`) in blocks of hidden vectors, and its gradients in the same pass.

Each hidden vector has one sum over negatives. For a block of hidden vectors, one matrix product gives the scores. The
scores of own items are overwritten by index, not by a mask of the whole block. Then the scores are replaced by their
exponentials. The total of each row gives its losses and the factor of its gradient. Two further products give the
gradients of hidden vectors and items. All blocks share one buffer. So the scores are read from the cache, and a step
does not ask the system for new memory again and again.

The weights of items are applied to the item vectors and not to the scores: Σ w e^s is a product of the exponentials
with w, and the gradients use the products with w · item. This saves two passes over the scores.

Shapes: as in `contrastive`; b sums of a block, p pairs of a block, c own items of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tackboard.ops.contrastive_reference import EXCLUDED

if TYPE_CHECKING:
    from tackboard.ops.contrastive import ContrastivePairs, OwnItems

BLOCK_CELLS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Number of scores of a block: 16 MiB, which a CPU's cache holds in part, or 512 MiB on a GPU."""
LEAST_SUMS = 256
"""Fewest sums of a block, because products of a few rows are slow. MOST_CELLS may force fewer sums."""
MOST_CELLS = 1 << 27
"""Largest number of scores of a block: 512 MiB."""
LEAST_SUM = 1e-30
"""If a sum of powers is smaller, its block is computed again without the items of weight 0. The gradients divide by the
sums, and would overflow with a very small sum."""


def contrastive_loss(
    hidden_RD: torch.Tensor,
    negatives_KD: torch.Tensor,
    rights_PD: torch.Tensor,
    log_weights_K: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses; see `contrastive.Implementation`."""
    total, losses_P = OnePass.apply(hidden_RD, negatives_KD, rights_PD, log_weights_K, pairs, own, _compute)
    return total, losses_P


def sums_per_block(num_items: int, device_type: str) -> int:
    """Returns the number of sums that are computed at a time."""
    num_items = max(1, num_items)
    fitting = max(BLOCK_CELLS[device_type] // num_items, min(LEAST_SUMS, MOST_CELLS // num_items))
    return max(1, fitting)


class OnePass(torch.autograd.Function):
    """The loss as a function of three kinds of vectors. `compute` returns the losses and the gradients of these
    vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        negatives_KD: torch.Tensor,
        rights_PD: torch.Tensor,
        log_weights_K: torch.Tensor,
        pairs: ContrastivePairs,
        own: OwnItems | None,
        compute: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = (hidden_RD, negatives_KD, rights_PD)
        device_type = hidden_RD.device.type
        # Only the large products (`_product`) are computed in autocast's type.
        is_on = torch.is_autocast_enabled(device_type)
        product_type = torch.get_autocast_dtype(device_type) if is_on else hidden_RD.dtype
        with torch.autocast(device_type, enabled=False):
            losses_P, gradients = compute(
                *(tensor.float() for tensor in vectors),
                log_weights_K.float(),
                pairs,
                own,
                product_type,
                needs_gradient=any(ctx.needs_input_grad[:3]),
            )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in vectors]
        ctx.mark_non_differentiable(losses_P)
        return (losses_P * pairs.weights).sum(), losses_P

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = upstream[0]
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*((gradient * factor).to(dtype) for gradient, dtype in gradients), *(None,) * 4)


def _compute(
    hidden_RD: torch.Tensor,
    negatives_KD: torch.Tensor,
    rights_PD: torch.Tensor,
    log_weights_K: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
    product_type: torch.dtype,
    *,
    needs_gradient: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns the losses [P], and the gradients of the total with respect to the three kinds of vectors, in fp32."""
    device = hidden_RD.device
    weights_K = log_weights_K.exp()
    weighted_KD = negatives_KD * weights_K[:, None]
    hidden_PD = hidden_RD.index_select(0, pairs.sums)
    right_P = (hidden_PD * rights_PD).sum(dim=-1)
    losses_P, slopes_P = torch.empty_like(right_P), torch.empty_like(right_P)
    hidden_gradient_RD, gradient_KD = torch.empty_like(hidden_RD), torch.zeros_like(negatives_KD)
    num_sums, num_negatives = len(hidden_RD), len(negatives_KD)
    step = sums_per_block(num_negatives, device.type)
    buffer = torch.empty(min(step, num_sums), num_negatives, device=device)
    chosen = _pairs_of_blocks(pairs, num_sums, step)
    for number, begin in enumerate(range(0, num_sums, step)):
        block = slice(begin, min(begin + step, num_sums))
        hidden_bD = hidden_RD[block]
        powers_bK = _product(hidden_bD, negatives_KD.T, product_type, out=buffer[: len(hidden_bD)])
        _exclude(powers_bK, block, pairs, own)
        sums_b, log_sums_b = _replace_by_powers(powers_bK, weights_K)
        if bool((sums_b < LEAST_SUM).any()):
            # The highest score of a sum is that of an item with weight 0, and the powers of the negatives vanish.
            _product(hidden_bD, negatives_KD.T, product_type, out=powers_bK)
            _exclude(powers_bK, block, pairs, own)
            powers_bK.masked_fill_(weights_K == 0, EXCLUDED)
            sums_b, log_sums_b = _replace_by_powers(powers_bK, weights_K)
        own_pairs = chosen[number]
        sums_p = pairs.sums[own_pairs] - begin
        excess_p = log_sums_b[sums_p] - right_P[own_pairs]
        losses_P[own_pairs] = functional.softplus(excess_p)
        if needs_gradient:
            slopes_p = torch.sigmoid(excess_p) * pairs.weights[own_pairs]
            slopes_P[own_pairs] = slopes_p
            factor_b = torch.zeros_like(sums_b).index_add_(0, sums_p, slopes_p) / sums_b.clamp_min(1e-38)
            gradient_bD = _product(powers_bK, weighted_KD, product_type, out=hidden_gradient_RD[block])
            gradient_bD.mul_(factor_b[:, None])
            scaled_bD = hidden_bD * factor_b[:, None]
            if product_type == torch.float32:
                gradient_KD.addmm_(powers_bK.T, scaled_bD)
            else:
                gradient_KD += _product(powers_bK.T, scaled_bD, product_type)
    if not needs_gradient:
        return losses_P, ()
    gradient_KD.mul_(weights_K[:, None])
    hidden_gradient_RD.index_add_(0, pairs.sums, rights_PD * -slopes_P[:, None])
    return losses_P, (hidden_gradient_RD, gradient_KD, hidden_PD * -slopes_P[:, None])


def _replace_by_powers(scores_bK: torch.Tensor, weights_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces each score by e^(s - highest score of its sum); returns Σ w e^(s - highest) and log Σ w e^s [b]."""
    highest_b1 = scores_bK.amax(dim=1, keepdim=True)
    scores_bK.sub_(highest_b1).exp_()
    sums_b = scores_bK @ weights_K
    return sums_b, highest_b1.squeeze(1) + sums_b.log()


def _product(
    left: torch.Tensor, right: torch.Tensor, product_type: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns left @ right in fp32, written into `out` if given; the product is computed in `product_type`."""
    if product_type == torch.float32:
        return torch.mm(left, right, out=out)
    product = torch.mm(left.to(product_type), right.to(product_type))
    return product.float() if out is None else out.copy_(product)


def _pairs_of_blocks(pairs: ContrastivePairs, num_sums: int, step: int) -> list[torch.Tensor | slice]:
    """Returns the pairs of each block of sums: as a slice if there is one pair per sum in order, else as positions."""
    begins = range(0, num_sums, step)
    if pairs.is_left_out:
        return [slice(begin, min(begin + step, num_sums)) for begin in begins]
    sorted_P, order_P = torch.sort(pairs.sums, stable=True)
    edges = torch.tensor([*begins, num_sums], device=sorted_P.device)
    return list(order_P.split(torch.searchsorted(sorted_P, edges).diff().tolist()))


def _exclude(scores_bK: torch.Tensor, block: slice, pairs: ContrastivePairs, own: OwnItems | None) -> None:
    """Writes EXCLUDED over the scores of own items and, if `pairs.is_left_out`, of each sum's positive item."""
    num_sums, num_negatives = scores_bK.shape
    flat = scores_bK.view(-1)
    firsts_b = torch.arange(num_sums, device=flat.device) * num_negatives
    if pairs.is_left_out:
        rights_b = pairs.items[block]
        is_negative_b = rights_b < num_negatives
        flat.index_fill_(0, (firsts_b + rights_b)[is_negative_b], EXCLUDED)
    if own is None:
        return
    groups_b = own.of_sum[block]
    begins_b = own.offsets[groups_b]
    lengths_b = own.offsets[groups_b + 1] - begins_b
    ends_b = lengths_b.cumsum(0)
    num_cells = int(ends_b[-1])
    places_c = torch.arange(num_cells, device=flat.device)
    places_c += torch.repeat_interleave(begins_b - ends_b + lengths_b, lengths_b, output_size=num_cells)
    items_c = own.items[places_c]
    is_out_c = items_c < num_negatives
    if own.places is not None and own.seen is not None:
        seen_c = torch.repeat_interleave(own.seen[block], lengths_b, output_size=num_cells)
        is_out_c &= own.places[places_c] < seen_c
    cells_c = items_c + torch.repeat_interleave(firsts_b, lengths_b, output_size=num_cells)
    flat.index_fill_(0, cells_c[is_out_c], EXCLUDED)
