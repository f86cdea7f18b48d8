"""Looks up very many indices in a table of a few rows, as an attention bias requires.

The input is a table [V, H] and indices of any shape; the output is one row per index. The forward pass is torch's
embedding lookup; this module exists for the backward pass. torch's own backward sorts the indices and gives each row to
a few threads. For 128 rows and millions of indices this takes longer than the attention itself. Here the gradient is
added up in many copies of the table, one for each part of the indices, and the copies are summed. So the additions are
spread over a million addresses instead of a few hundred. On a CPU the additions do not run in parallel, so there is
only one copy, and the order of the additions is fixed.

Shapes: V rows, H numbers per row, L indices in all, G copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

COPIES = 4096
"""Number of copies of the table on a GPU."""


def small_table_rows(table_VH: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the row of the table for each index, as a tensor [..., H]."""
    rows: torch.Tensor = _Lookup.apply(table_VH, index)
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VH: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(table_VH)
        ctx.dtype = table_VH.dtype
        return functional.embedding(index, table_VH)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        gradient_LH = gradients[0].reshape(index.numel(), gradients[0].shape[-1])
        gradient_LH = gradient_LH.to(torch.promote_types(gradient_LH.dtype, torch.float32))
        place_L = index.reshape(-1).long()
        copies = COPIES if index.is_cuda else 1
        if copies > 1:
            place_L = place_L + torch.arange(len(place_L), device=index.device) % copies * ctx.num_rows
        sums = gradient_LH.new_zeros(copies * ctx.num_rows, gradient_LH.shape[1])
        sums.index_add_(0, place_L, gradient_LH)
        table_VH = sums.view(copies, ctx.num_rows, sums.shape[1]).sum(dim=0).to(ctx.dtype)
        return table_VH, None
