"""Computes the contrastive loss (see `contrastive`) a block of hidden vectors at a time, gradients in the same pass.

Each hidden vector has one sum over negatives. For a block of hidden vectors, one matrix product gives the scores. The
scores of own items are overwritten by index, not by a mask of the whole block. Then the scores are replaced by their
exponentials. The total of each row gives its losses and the factor of its gradient. Two further products give the
gradients of hidden vectors and items. All blocks share one buffer. So the scores are read from the cache, and a step
does not ask the system for new memory again and again.

The weights of items are applied to the item vectors and not to the scores: Σ w e^s is a product of the exponentials
with w, and the gradients use the products with w · item. This saves two passes over the scores.

Shapes: as in `contrastive`; b sums of a block.
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


def contrastive_loss(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses; see `contrastive.contrastive_loss`."""
    total, losses_P = OnePass.apply(hidden_RD, items_MD, log_weights_M, pairs, own, _compute)
    return total, losses_P


def sums_per_block(num_items: int, device_type: str) -> int:
    """Returns the number of sums that are computed at a time."""
    num_items = max(1, num_items)
    fitting = max(BLOCK_CELLS[device_type] // num_items, min(LEAST_SUMS, MOST_CELLS // num_items))
    return max(1, fitting)


class OnePass(torch.autograd.Function):
    """The loss as a function of hidden vectors and items, whose gradients `compute` returns together with the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        items_MD: torch.Tensor,
        log_weights_M: torch.Tensor,
        pairs: ContrastivePairs,
        own: OwnItems | None,
        compute: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_gradient = any(ctx.needs_input_grad[:2])
        device_type = hidden_RD.device.type
        # Only the large products (`_product`) are computed in autocast's type.
        is_on = torch.is_autocast_enabled(device_type)
        product_type = torch.get_autocast_dtype(device_type) if is_on else hidden_RD.dtype
        with torch.autocast(device_type, enabled=False):
            losses_P, gradients = compute(
                hidden_RD.float(),
                items_MD.float(),
                log_weights_M,
                pairs,
                own,
                product_type,
                needs_gradient=needs_gradient,
            )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden_RD.dtype, items_MD.dtype
        ctx.mark_non_differentiable(losses_P)
        return (losses_P * pairs.weights).sum(), losses_P

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_RD, items_MD = ctx.saved_tensors
        factor = upstream[0]
        return (hidden_RD * factor).to(ctx.dtypes[0]), (items_MD * factor).to(ctx.dtypes[1]), *(None,) * 4


def _compute(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
    product_type: torch.dtype,
    *,
    needs_gradient: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns the losses [P], and the gradients of the total with respect to hidden vectors and items, in fp32."""
    device = hidden_RD.device
    weights_M = log_weights_M.float().exp()
    weighted_MD = items_MD * weights_M[:, None]
    hidden_PD, right_PD = hidden_RD.index_select(0, pairs.sums), items_MD.index_select(0, pairs.items)
    right_P = (hidden_PD * right_PD).sum(dim=-1)
    losses_P, slopes_P = torch.empty_like(right_P), torch.empty_like(right_P)
    hidden_gradient_RD, items_gradient_MD = torch.empty_like(hidden_RD), torch.zeros_like(items_MD)
    num_sums, num_items = len(hidden_RD), len(items_MD)
    step = sums_per_block(num_items, device.type)
    buffer = torch.empty(min(step, num_sums), num_items, device=device)
    chosen = _pairs_of_blocks(pairs, num_sums, step)
    for number, begin in enumerate(range(0, num_sums, step)):
        block = slice(begin, min(begin + step, num_sums))
        hidden_bD = hidden_RD[block]
        powers_bM = _product(hidden_bD, items_MD.T, product_type, out=buffer[: len(hidden_bD)])
        _exclude(powers_bM, block, pairs, own)
        highest_b1 = powers_bM.amax(dim=1, keepdim=True)
        powers_bM.sub_(highest_b1).exp_()
        sums_b = powers_bM @ weights_M
        log_sums_b = highest_b1.squeeze(1) + sums_b.log()
        own_pairs = chosen[number]
        sums_p = pairs.sums[own_pairs] - begin
        excess_p = log_sums_b[sums_p] - right_P[own_pairs]
        losses_P[own_pairs] = functional.softplus(excess_p)
        if needs_gradient:
            slopes_p = torch.sigmoid(excess_p) * pairs.weights[own_pairs]
            slopes_P[own_pairs] = slopes_p
            factor_b = torch.zeros_like(sums_b).index_add_(0, sums_p, slopes_p) / sums_b.clamp_min(1e-38)
            gradient_bD = _product(powers_bM, weighted_MD, product_type, out=hidden_gradient_RD[block])
            gradient_bD.mul_(factor_b[:, None])
            scaled_bD = hidden_bD * factor_b[:, None]
            if product_type == torch.float32:
                items_gradient_MD.addmm_(powers_bM.T, scaled_bD)
            else:
                items_gradient_MD += _product(powers_bM.T, scaled_bD, product_type)
    if not needs_gradient:
        return losses_P, ()
    items_gradient_MD.mul_(weights_M[:, None])
    hidden_gradient_RD.index_add_(0, pairs.sums, right_PD * -slopes_P[:, None])
    items_gradient_MD.index_add_(0, pairs.items, hidden_PD * -slopes_P[:, None])
    return losses_P, (hidden_gradient_RD, items_gradient_MD)


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


def _exclude(scores_bM: torch.Tensor, block: slice, pairs: ContrastivePairs, own: OwnItems | None) -> None:
    """Writes EXCLUDED over the scores of own items and, if `pairs.is_left_out`, of each sum's positive item."""
    num_sums, num_items = scores_bM.shape
    flat = scores_bM.view(-1)
    firsts_b = torch.arange(num_sums, device=flat.device) * num_items
    if pairs.is_left_out:
        flat.index_fill_(0, firsts_b + pairs.items[block], EXCLUDED)
    if own is None:
        return
    groups_b = own.of_sum[block]
    begins_b = own.offsets[groups_b]
    lengths_b = own.offsets[groups_b + 1] - begins_b
    ends_b = lengths_b.cumsum(0)
    num_cells = int(ends_b[-1])
    places_c = torch.arange(num_cells, device=flat.device)
    places_c += torch.repeat_interleave(begins_b - ends_b + lengths_b, lengths_b, output_size=num_cells)
    cells_c = own.items[places_c] + torch.repeat_interleave(firsts_b, lengths_b, output_size=num_cells)
    if own.places is not None and own.seen is not None:
        seen_c = torch.repeat_interleave(own.seen[block], lengths_b, output_size=num_cells)
        cells_c = cells_c[own.places[places_c] < seen_c]
    flat.index_fill_(0, cells_c, EXCLUDED)
