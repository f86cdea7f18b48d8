"""Looks up rows and updates them in plain PyTorch: the fast path on a CPU, and the plain twin of `table_rows_triton`.

`table_rows` states the contract. Decided for the CPU, by measurement: each row number and its place are packed into one
64-bit number, and NumPy sorts these numbers. This is several times faster than torch's sort, which also returns the
places. The packed numbers are all different, so equal rows stay in their order. Repeated rows are added by
`embedding_bag`, which reads the gradient in place, adds in that order, and gives each row to one thread. So the result
does not depend on the number of threads.

Shapes: M items, k sub-tables, D = k × d, R rows of the weight, d width of a row, L looked-up rows, U distinct rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from tackboard.ops.stochastic_rounding import FORMATS, stochastic_round

MOST_NARROW_ROWS = (1 << 31) - 1
"""Largest number of rows that can be numbered with int32."""
BLOCK_ELEMENTS = 1 << 16
"""Number of elements that are updated at once on a CPU, so that the intermediate results stay in its cache."""


def row_dtype(num_rows: int) -> torch.dtype:
    """Returns the type of row numbers of a weight with `num_rows` rows."""
    return torch.int32 if num_rows <= MOST_NARROW_ROWS else torch.int64


def lookup(
    weight_Rd: torch.Tensor, item_rows_MK: torch.Tensor, first_rows_K: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `table_rows.lookup`."""
    rows_MK = item_rows_MK + first_rows_K
    is_padding_MK = item_rows_MK < 0
    # Row numbers on the meta device have no values, so none of them counts as padding.
    has_padding = not is_padding_MK.is_meta and bool(is_padding_MK.any())
    if has_padding:
        rows_MK = rows_MK.masked_fill(is_padding_MK, 0)
    vectors_MKd = functional.embedding(rows_MK, weight_Rd).to(dtype)
    if has_padding:
        vectors_MKd.masked_fill_(is_padding_MK[:, :, None], 0.0)
        rows_MK = rows_MK.masked_fill(is_padding_MK, -1)
    return vectors_MKd.flatten(1), rows_MK.flatten().to(row_dtype(len(weight_Rd)))


def row_wise_adagrad_(
    weight_Rd: torch.Tensor,
    sums_R: torch.Tensor,
    rows_L: torch.Tensor,
    gradient_Ld: torch.Tensor,
    *,
    learning_rate: torch.Tensor,
    keep: torch.Tensor,
    clip_element: float,
    eps: float,
    rounding_key: torch.Tensor | int,
) -> None:
    """See `table_rows.row_wise_adagrad_`."""
    if not keep:
        return
    rows_L, order_L = sorted_rows(rows_L, len(weight_Rd))
    num_padding = int(torch.searchsorted(rows_L, 0))
    rows_L, order_L = rows_L[num_padding:].long(), order_L[num_padding:]
    if not len(rows_L):
        return
    gradient_Ld = gradient_Ld.float()
    rows_U, counts_U = torch.unique_consecutive(rows_L, return_counts=True)
    ends_U = counts_U.cumsum(0)
    block = len(rows_U) if rows_L.is_cuda else max(1, BLOCK_ELEMENTS // weight_Rd.shape[1])
    end = 0
    for first in range(0, len(rows_U), block):
        own = slice(first, first + block)
        start, end = end, int(ends_U[own][-1])
        total_Ud = functional.embedding_bag(
            order_L[start:end], gradient_Ld, ends_U[own] - counts_U[own] - start, mode="sum"
        )
        _update(weight_Rd, sums_R, rows_U[own], total_Ud, learning_rate, clip_element, eps, rounding_key)


def _update(
    weight_Rd: torch.Tensor,
    sums_R: torch.Tensor,
    rows_U: torch.Tensor,
    total_Ud: torch.Tensor,
    learning_rate: torch.Tensor,
    clip_element: float,
    eps: float,
    rounding_key: torch.Tensor | int,
) -> None:
    """Updates distinct rows with the totals of their gradients. The totals are overwritten."""
    total_Ud.clamp_(-clip_element, clip_element)
    sums_U = sums_R.index_select(0, rows_U).add_(total_Ud.square().mean(dim=1))
    sums_R.index_copy_(0, rows_U, sums_U)
    is_still_U = sums_U == 0
    change_Ud = total_Ud.mul_(learning_rate).div_(sums_U.sqrt_().add_(eps)[:, None])
    change_Ud.masked_fill_(is_still_U[:, None], 0.0)
    moved_Ud = weight_Rd.index_select(0, rows_U).float().sub_(change_Ud)
    if weight_Rd.dtype in FORMATS:
        moved_Ud = stochastic_round(moved_Ud, weight_Rd.dtype, rows_U, rounding_key)
    weight_Rd.index_copy_(0, rows_U, moved_Ud)


def sorted_rows(rows_L: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows in rising order and the places they came from; equal rows stay in their order."""
    if rows_L.device.type != "cpu" or num_rows > MOST_NARROW_ROWS:
        rows_L, order_L = torch.sort(rows_L, stable=True)
        return rows_L, order_L
    packed_L = (rows_L.long() << 32) + torch.arange(len(rows_L))
    packed_L = torch.from_numpy(np.sort(packed_L.numpy()))
    return packed_L >> 32, packed_L & 0xFFFFFFFF
