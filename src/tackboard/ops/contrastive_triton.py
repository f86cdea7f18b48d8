"""Computes the contrastive loss (see `contrastive`) with Triton kernels on a GPU. Scores exist only in registers.

    forward    a program has BLOCK_R sums and visits all items:  scores → running maximum and sum → log sum
    backward   a program has BLOCK_R sums and visits all items:  scores → softmax · slope → gradient of hidden vectors
               a program has BLOCK_M items and visits all sums:  the same                → gradient of items

Each program writes its own rows, so no two programs add to one address, and results repeat bit for bit. The scores are
computed again in the backward pass, because R × M scores would fill the memory, and reading them would take longer. The
kernels read own items as a table [G, M] of bytes, or of places if later items stay negatives.

Products are computed in the type of autocast and summed in fp32. In fp32 they are exact to the last bits (`ieee`), not
rounded to TF32. The slopes are divided by their largest value before the products, because fp16 loses small slopes.

Shapes: as in `contrastive`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tackboard.ops.contrastive_reference import EXCLUDED, own_mask, total_and_losses

if TYPE_CHECKING:
    from tackboard.ops.contrastive import ContrastivePairs, OwnItems

NO_OWN, OWN, OWN_BEFORE = 0, 1, 2
"""Whether own items are taken out: never, always, or if their place is below the number of events that were seen."""
_EXCLUDED = tl.constexpr(EXCLUDED)


def contrastive_loss(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    pairs: ContrastivePairs,
    own: OwnItems | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total and the losses; see `contrastive.contrastive_loss`."""
    log_sums_R = log_sums(hidden_RD, items_MD, log_weights_M, pairs.items if pairs.is_left_out else None, own)
    return total_and_losses(log_sums_R, hidden_RD, items_MD, pairs)


def log_sums(
    hidden_RD: torch.Tensor,
    items_MD: torch.Tensor,
    log_weights_M: torch.Tensor,
    left_out_R: torch.Tensor | None,
    own: OwnItems | None,
) -> torch.Tensor:
    """Returns log Σ w e^s over the negatives of each sum, in fp32 [R]; hidden vectors and items have gradients."""
    if torch.is_autocast_enabled(hidden_RD.device.type):
        hidden_RD, items_MD = (
            tensor.to(torch.get_autocast_dtype(tensor.device.type)) for tensor in (hidden_RD, items_MD)
        )
    result: torch.Tensor = _LogSums.apply(hidden_RD, items_MD, log_weights_M.float(), left_out_R, own)
    return result


class _LogSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        items_MD: torch.Tensor,
        log_weights_M: torch.Tensor,
        left_out_R: torch.Tensor | None,
        own: OwnItems | None,
    ) -> torch.Tensor:
        hidden_RD, items_MD = hidden_RD.contiguous(), items_MD.contiguous()
        mask = None if own is None else own_mask(own, len(items_MD))
        mask = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
        log_sums_R = torch.full((len(hidden_RD),), EXCLUDED, dtype=torch.float32, device=hidden_RD.device)
        ctx.inputs = _Inputs(hidden_RD, items_MD, log_weights_M, left_out_R, own, mask)
        if len(hidden_RD) and len(items_MD):
            sizes = tile_sizes(hidden_RD.shape[1], hidden_RD.element_size())
            grid = (triton.cdiv(len(hidden_RD), sizes["BLOCK_R"]),)
            forward_kernel[grid](*ctx.inputs.pointers(log_sums_R), **ctx.inputs.constants(), **sizes)
        ctx.save_for_backward(log_sums_R)
        return log_sums_R

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (log_sums_R,) = ctx.saved_tensors
        inputs: _Inputs = ctx.inputs
        hidden_RD, items_MD = inputs.hidden_RD, inputs.items_MD
        slopes_R = upstream[0].float()
        hidden_gradient_RD = torch.zeros_like(hidden_RD, dtype=torch.float32)
        items_gradient_MD = torch.zeros_like(items_MD, dtype=torch.float32)
        if len(hidden_RD) and len(items_MD):
            largest = slopes_R.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            sizes = tile_sizes(hidden_RD.shape[1], hidden_RD.element_size())
            constants = inputs.constants()
            arguments = (*inputs.pointers(log_sums_R), (slopes_R / largest).contiguous())
            hidden_kernel[(triton.cdiv(len(hidden_RD), sizes["BLOCK_R"]),)](
                *arguments, hidden_gradient_RD, **constants, **sizes
            )
            items_kernel[(triton.cdiv(len(items_MD), sizes["BLOCK_M"]),)](
                *arguments, items_gradient_MD, **constants, **sizes
            )
            hidden_gradient_RD.mul_(largest)
            items_gradient_MD.mul_(largest)
        return hidden_gradient_RD.to(hidden_RD.dtype), items_gradient_MD.to(items_MD.dtype), None, None, None


class _Inputs:
    """The arguments that all kernels share."""

    def __init__(
        self,
        hidden_RD: torch.Tensor,
        items_MD: torch.Tensor,
        log_weights_M: torch.Tensor,
        left_out_R: torch.Tensor | None,
        own: OwnItems | None,
        mask: torch.Tensor | None,
    ) -> None:
        self.hidden_RD, self.items_MD = hidden_RD, items_MD
        self.log_weights_M, self.left_out_R, self.own, self.mask = log_weights_M.contiguous(), left_out_R, own, mask

    def pointers(self, log_sums_R: torch.Tensor) -> tuple[Any, ...]:
        """Returns the tensors and sizes in the order of the kernels' parameters. Unused parameters get any tensor."""
        own, unused = self.own, log_sums_R
        return (
            self.hidden_RD,
            self.items_MD,
            self.log_weights_M,
            unused if self.mask is None else self.mask,
            unused if own is None else own.of_sum,
            unused if own is None or own.seen is None else own.seen,
            unused if self.left_out_R is None else self.left_out_R,
            log_sums_R,
            len(self.hidden_RD),
            len(self.items_MD),
        )

    def constants(self) -> dict[str, Any]:
        """Returns the compile-time constants other than the sizes of tiles."""
        width = self.hidden_RD.shape[1]
        own = NO_OWN if self.own is None else OWN if self.own.seen is None else OWN_BEFORE
        return {"D": width, "HAS_OWN": own, "HAS_LEFT_OUT": self.left_out_R is not None}


def tile_sizes(width: int, num_bytes: int = 2) -> dict[str, int]:
    """Returns the sizes of tiles, the warps and the stages for vectors of `width` elements of `num_bytes` each.

    A program holds a gradient of BLOCK × width numbers in fp32 in registers, so wider vectors have fewer rows per tile.
    The sizes are the largest for which the compiler spills few registers (`-v` of ptxas) and the shared memory fits.
    """
    padded = max(16, triton.next_power_of_2(width))
    rows, columns = (128, 64) if padded <= 128 else (64, 64) if padded <= 512 else (32, 32)
    share = max(1, num_bytes // 2)
    return {
        "BLOCK_R": max(16, rows // share),
        "BLOCK_M": max(16, columns // share),
        "BLOCK_D": padded,
        "num_warps": 8,
        "num_stages": 2,
    }


@triton.jit
def _load_rows(pointer, rows, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    is_inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * D + columns[None, :], mask=is_inside, other=0.0)


@triton.jit
def _store_rows(pointer, values, rows, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    is_inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    tl.store(pointer + rows.to(tl.int64)[:, None] * D + columns[None, :], values, mask=is_inside)


@triton.jit
def _scores(
    hidden, items, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer, sums, columns,
    num_sums, num_items, HAS_OWN: tl.constexpr, HAS_LEFT_OUT: tl.constexpr,
):  # fmt: skip
    """Returns the scores of a tile, and whether each score belongs to a negative. Padding has the score -inf."""
    is_sum, is_item = sums < num_sums, columns < num_items
    scores = tl.dot(hidden, tl.trans(items), input_precision="ieee")
    scores += tl.load(log_weights_pointer + columns, mask=is_item, other=0.0)[None, :]
    is_negative = is_sum[:, None] & is_item[None, :]
    is_excluded = tl.zeros(scores.shape, dtype=tl.int1)
    if HAS_OWN > 0:
        groups = tl.load(group_pointer + sums, mask=is_sum, other=0).to(tl.int64)
        cells = own_pointer + groups[:, None] * num_items + columns[None, :]
        if HAS_OWN == 1:
            is_excluded = tl.load(cells, mask=is_negative, other=0) != 0
        else:
            seen = tl.load(seen_pointer + sums, mask=is_sum, other=0)
            is_excluded = tl.load(cells, mask=is_negative, other=0).to(tl.int64) < seen.to(tl.int64)[:, None]
    if HAS_LEFT_OUT:
        left_out = tl.load(left_out_pointer + sums, mask=is_sum, other=-1)
        is_excluded = is_excluded | (columns[None, :] == left_out[:, None])
    scores = tl.where(is_excluded, _EXCLUDED, scores)
    scores = tl.where(is_item[None, :], scores, float("-inf"))
    return scores, is_negative & ~is_excluded


@triton.jit
def forward_kernel(
    hidden_pointer, items_pointer, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer,
    log_sums_pointer, num_sums, num_items,
    D: tl.constexpr, HAS_OWN: tl.constexpr, HAS_LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the log sums of BLOCK_R sums."""
    sums = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    hidden = _load_rows(hidden_pointer, sums, num_sums, D, BLOCK_D)
    highest = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    for first in range(0, num_items, BLOCK_M):
        columns = first + tl.arange(0, BLOCK_M)
        items = _load_rows(items_pointer, columns, num_items, D, BLOCK_D)
        scores, _ = _scores(
            hidden, items, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer, sums,
            columns, num_sums, num_items, HAS_OWN, HAS_LEFT_OUT,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(scores - higher[:, None]), 1)
        highest = higher
    tl.store(log_sums_pointer + sums, highest + tl.log(total), mask=sums < num_sums)


@triton.jit
def hidden_kernel(
    hidden_pointer, items_pointer, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer,
    log_sums_pointer, num_sums, num_items, slopes_pointer, gradient_pointer,
    D: tl.constexpr, HAS_OWN: tl.constexpr, HAS_LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of BLOCK_R hidden vectors."""
    sums = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_sum = sums < num_sums
    hidden = _load_rows(hidden_pointer, sums, num_sums, D, BLOCK_D)
    log_sums_ = tl.load(log_sums_pointer + sums, mask=is_sum, other=0.0)
    slopes = tl.load(slopes_pointer + sums, mask=is_sum, other=0.0)
    gradient = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for first in range(0, num_items, BLOCK_M):
        columns = first + tl.arange(0, BLOCK_M)
        items = _load_rows(items_pointer, columns, num_items, D, BLOCK_D)
        scores, is_negative = _scores(
            hidden, items, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer, sums,
            columns, num_sums, num_items, HAS_OWN, HAS_LEFT_OUT,
        )  # fmt: skip
        share = tl.where(is_negative, tl.exp(scores - log_sums_[:, None]) * slopes[:, None], 0.0)
        gradient += tl.dot(share.to(items.dtype), items, input_precision="ieee")
    _store_rows(gradient_pointer, gradient, sums, num_sums, D, BLOCK_D)


@triton.jit
def items_kernel(
    hidden_pointer, items_pointer, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer,
    log_sums_pointer, num_sums, num_items, slopes_pointer, gradient_pointer,
    D: tl.constexpr, HAS_OWN: tl.constexpr, HAS_LEFT_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of BLOCK_M items."""
    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    items = _load_rows(items_pointer, columns, num_items, D, BLOCK_D)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for first in range(0, num_sums, BLOCK_R):
        sums = first + tl.arange(0, BLOCK_R)
        is_sum = sums < num_sums
        hidden = _load_rows(hidden_pointer, sums, num_sums, D, BLOCK_D)
        log_sums_ = tl.load(log_sums_pointer + sums, mask=is_sum, other=0.0)
        slopes = tl.load(slopes_pointer + sums, mask=is_sum, other=0.0)
        scores, is_negative = _scores(
            hidden, items, log_weights_pointer, own_pointer, group_pointer, seen_pointer, left_out_pointer, sums,
            columns, num_sums, num_items, HAS_OWN, HAS_LEFT_OUT,
        )  # fmt: skip
        share = tl.where(is_negative, tl.exp(scores - log_sums_[:, None]) * slopes[:, None], 0.0)
        gradient += tl.dot(tl.trans(share.to(hidden.dtype)), hidden, input_precision="ieee")
    _store_rows(gradient_pointer, gradient, columns, num_items, D, BLOCK_D)
