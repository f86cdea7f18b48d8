"""Computes the contrastive loss (see `contrastive`) on a GPU: matrix products by torch, everything else by one kernel.

For a block of hidden vectors, a product gives the scores. A program of the kernel owns the scores of one sum. It takes
out the user's own items, adds the log weights, and replaces the scores by their exponentials in place. It also computes
the losses of the sum's pairs and the factor of the sum's gradient. Then two products give the gradients of hidden
vectors and negatives. So a step has three large products, and the scores of all sums never exist at the same time.

Decided: kernels that keep the scores in registers and compute them again in the backward pass (four products) were
built and measured: they took 59 ms for 65,536 sums × 32,768 items × 512 on an H200, more than three times as long as
the kernel here (docs/log.md).

Decided: in half precision, products and scores are fp16 and not bf16. The vectors are unit vectors divided by a
temperature of at least 0.01, so they and their scores fit into fp16, and fp16 rounds scores eight times as finely as
bf16. Sums are fp32. The weights of pairs are divided by the largest weight before the products, because fp16 loses
small factors.

No two programs add to one address, and the gradients of positives are added in a fixed order. So results repeat bit for
bit. The host never waits for the device.

Shapes: as in `contrastive`; b sums of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tackboard.ops.contrastive_blocked import OnePass
from tackboard.ops.contrastive_reference import EXCLUDED

if TYPE_CHECKING:
    from tackboard.ops.contrastive import ContrastivePairs, OwnItems

NO_OWN, OWN, OWN_BEFORE = 0, 1, 2
"""Whether own items are taken out: never, always, or if their place is below the number of events that were seen."""
BLOCK = 2048
"""Number of scores that a program reads at a time."""
OWN_BLOCK = 64
"""Number of own items that a program takes out at a time."""
BLOCK_CELLS = 1 << 28
"""Number of scores of a block of sums: 512 MiB in fp16."""
_EXCLUDED = tl.constexpr(EXCLUDED)


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
    device, (num_sums, num_negatives) = hidden_RD.device, (len(hidden_RD), len(negatives_KD))
    hidden_PD = hidden_RD.index_select(0, pairs.sums)
    right_P = (hidden_PD * rights_PD).sum(dim=-1)
    losses_P, slopes_P = torch.zeros_like(right_P), torch.zeros_like(right_P)
    gradient_RD, gradient_KD = torch.zeros_like(hidden_RD), torch.zeros_like(negatives_KD)
    if not len(pairs.sums) or not num_negatives:
        return losses_P, (gradient_RD, gradient_KD, torch.zeros_like(rights_PD))
    largest = pairs.weights.abs().amax().clamp_min(1e-38)
    weights_P = (pairs.weights / largest).float()
    order_P, begins = _pairs_of_sums(pairs, num_sums)
    factors_R = torch.empty(num_sums, dtype=torch.float32, device=device)
    product_type = torch.float32 if product_type == torch.float32 else torch.float16
    typed_RD, typed_KD = hidden_RD.to(product_type), negatives_KD.to(product_type)
    step = max(1, BLOCK_CELLS // num_negatives)
    buffer = torch.empty(min(step, num_sums), num_negatives, dtype=product_type, device=device)
    for begin in range(0, num_sums, step):
        block = slice(begin, min(begin + step, num_sums))
        powers_bK = _product(typed_RD[block], typed_KD.T, out=buffer[: block.stop - begin])
        powers_kernel[(len(powers_bK),)](
            powers_bK,
            log_weights_K,
            *_lists(own, pairs),
            *(order_P, begins, right_P, weights_P, losses_P, slopes_P, factors_R),
            *(begin, num_negatives),
            HAS_OWN=NO_OWN if own is None else OWN if own.seen is None else OWN_BEFORE,
            HAS_LEFT_OUT=pairs.is_left_out,
            BLOCK=BLOCK,
            OWN_BLOCK=OWN_BLOCK,
            num_warps=8,
        )
        if needs_gradient:
            _product(powers_bK, typed_KD, out=gradient_RD[block])
            scaled_bD = (hidden_RD[block] * factors_R[block, None]).to(product_type)
            _add_product(gradient_KD, powers_bK.T, scaled_bD)
    if not needs_gradient:
        return losses_P, ()
    gradient_RD.mul_(factors_R[:, None])
    gradient_PD = rights_PD * -slopes_P[:, None]
    gradient_RD += gradient_PD if pairs.is_left_out else _summed(gradient_PD, pairs.sums, num_sums)
    hidden_PD *= -slopes_P[:, None]
    return losses_P, tuple(gradient.mul_(largest) for gradient in (gradient_RD, gradient_KD, hidden_PD))


def _pairs_of_sums(pairs: ContrastivePairs, num_sums: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs in the order of their sums [P], and where the pairs of each sum begin in this order [R + 1]."""
    numbers = torch.arange(num_sums + 1, device=pairs.sums.device)
    if pairs.is_left_out:
        return numbers, numbers
    sorted_P, order_P = torch.sort(pairs.sums, stable=True)
    return order_P, torch.searchsorted(sorted_P, numbers)


def _summed(vectors_PD: torch.Tensor, rows_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Adds up the vectors of each row, in a fixed order (index_add_ would add in any order on a GPU)."""
    return torch.ops.aten.embedding_dense_backward(vectors_PD, rows_P, num_rows, -1, False)


def _lists(own: OwnItems | None, pairs: ContrastivePairs) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that say which scores are taken out. A tensor that is never read may be any tensor."""
    if own is None:
        return (pairs.items,) * 6
    places = pairs.items if own.places is None else own.places
    seen = pairs.items if own.seen is None else own.seen
    return own.offsets, own.items, places, own.of_sum, seen, pairs.items


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes left @ right to `out`, which is fp32 or has the type of `left`."""
    if left.dtype == out.dtype and (left.is_cuda or left.dtype == torch.float32):
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return out.copy_(left.float() @ right.float())


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total` in fp32."""
    if left.dtype != torch.float32 and left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


@triton.jit
def powers_kernel(
    scores, log_weights, own_offsets, own_items, own_places, group_of_sum, seen_of_sum, pair_items,
    order, begins, rights, weights, losses, slopes, factors, first_sum, num_negatives,
    HAS_OWN: tl.constexpr, HAS_LEFT_OUT: tl.constexpr, BLOCK: tl.constexpr, OWN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces the scores of one sum by w e^(s - highest). Writes losses and slopes of its pairs, and its factor.

    The gradient of the sum's hidden vector is factor × Σ w e^(s - highest) item.
    """
    row = tl.program_id(0).to(tl.int64)
    sum_number = first_sum + row
    scores += row * num_negatives
    excluded = tl.full([OWN_BLOCK], _EXCLUDED, dtype=tl.float32).to(scores.dtype.element_ty)
    if HAS_OWN > 0:
        group = tl.load(group_of_sum + sum_number)
        end = tl.load(own_offsets + group + 1)
        for first in range(tl.load(own_offsets + group), end, OWN_BLOCK):
            entries = first + tl.arange(0, OWN_BLOCK)
            items = tl.load(own_items + entries, mask=entries < end, other=num_negatives)
            is_out = items < num_negatives
            if HAS_OWN == 2:
                places = tl.load(own_places + entries, mask=entries < end, other=0)
                is_out = is_out & (places < tl.load(seen_of_sum + sum_number))
            tl.store(scores + items, excluded, mask=is_out)
    if HAS_LEFT_OUT:
        only = tl.arange(0, OWN_BLOCK)
        left_out = tl.load(pair_items + sum_number)
        tl.store(scores + left_out + only, excluded, mask=(only == 0) & (left_out < num_negatives))
    tl.debug_barrier()  # All threads of the program must see the scores that were taken out.
    highest_in_place = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, num_negatives, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_inside = columns < num_negatives
        found = tl.load(scores + columns, mask=is_inside, other=float("-inf")).to(tl.float32)
        found += tl.load(log_weights + columns, mask=is_inside, other=0.0)
        highest_in_place = tl.maximum(highest_in_place, found)
    highest = tl.max(highest_in_place, 0)
    total_in_place = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, num_negatives, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_inside = columns < num_negatives
        found = tl.load(scores + columns, mask=is_inside, other=float("-inf")).to(tl.float32)
        found += tl.load(log_weights + columns, mask=is_inside, other=0.0)
        power = tl.exp(found - highest)
        total_in_place += power
        tl.store(scores + columns, power.to(scores.dtype.element_ty), mask=is_inside)
    total = tl.sum(total_in_place, 0)
    log_sum = highest + tl.log(total)
    factor = 0.0
    for place in range(tl.load(begins + sum_number), tl.load(begins + sum_number + 1)):
        pair = tl.load(order + place)
        excess = log_sum - tl.load(rights + pair)
        small = tl.exp(-tl.abs(excess))
        tl.store(losses + pair, tl.maximum(excess, 0.0) + tl.log(1.0 + small))
        slope = tl.where(excess >= 0, 1.0, small) / (1.0 + small) * tl.load(weights + pair)
        tl.store(slopes + pair, slope)
        factor += slope
    tl.store(factors + sum_number, factor / total)
