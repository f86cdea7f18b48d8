"""Computes causal attention of packed rows, in the fastest way that the device and the settings allow.

Queries, keys and values are packed tokens [T, H, d], and `RowLayout` says where rows lie. A token reads itself and the
tokens before it in its row. The output is what each token reads [T, H, d].

    device, setting                                           way
    CPU                                                       grids of rows of similar length (`_reference`)
    GPU, with dropout of weights or very wide heads           the same grids; a message says so
    GPU, softmax without a bias of long rows, bf16 or fp16    torch's varlen_attn (Flash Attention)
    GPU, everything else                                      our kernels (`_triton`); the same grids without Triton

Measured on an H200, forward and backward of 65,536 tokens, 8 heads of width 64, bf16: rows of 48 tokens on average take
3.1 ms by varlen_attn and 1.5 ms by our kernels; rows of 256 tokens take 0.9 ms and 1.2 ms. So short rows take our way.

Decided: attention with a bias runs in our own kernels and not in FlexAttention. FlexAttention always applies a softmax,
so it cannot compute HSTU's pointwise weights.

Shapes: T packed tokens, H heads, d width of a head.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import torch

from tackboard.batch.row_layout import BLOCK, RowLayout
from tackboard.core.errors import DataError
from tackboard.ops.packed_attention_reference import SOFTMAX, Elapsed, Weighing, grouped_attention

__all__ = ["SOFTMAX", "Elapsed", "Weighing", "packed_attention", "varlen_attention", "with_tiles"]

MAX_HEAD_BYTES = 512
"""Widest head of Flash Attention and of our kernels: 256 numbers of 2 bytes, or 128 of 4 bytes."""

MAX_TILE_BYTES = 1 << 30
"""Largest memory of the stored buckets of a batch. Eight rows of 16,000 tokens take 1 GiB."""


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:  # An import hook may raise this error.
        return False


HAS_TRITON = _has_triton()
"""Decided at import, because compiled layers cannot look for modules."""


def packed_attention(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    layout: RowLayout,
    weighing: Weighing = SOFTMAX,
) -> torch.Tensor:
    """Returns what each token reads [T, H, d]. The module's docstring says which way is chosen."""
    if len(q_THd) != layout.num_tokens:
        raise DataError(
            f"attention was given {len(q_THd):,} tokens, but the layout of their rows has {layout.num_tokens:,}",
            fix="build the layout from the offsets of the same batch",
        )
    way = choose(q_THd, layout, weighing)
    if way == "varlen":
        return varlen_attention(q_THd, k_THd, v_THd, layout)
    if way == "triton":
        # Triton is imported only where it runs, so that the package works without it.
        from tackboard.ops.packed_attention_triton import triton_attention

        return triton_attention(q_THd, k_THd, v_THd, layout, weighing)
    return grouped_attention(q_THd, k_THd, v_THd, layout, weighing)


def with_tiles(elapsed: Elapsed, layout: RowLayout) -> Elapsed:
    """Returns the elapsed times with the buckets of all pairs, so that no layer searches them again.

    Call this function before the layers. It does nothing where our kernels do not run, and where the buckets do not fit
    into a byte or into MAX_TILE_BYTES. Then each program of our kernels searches the buckets that it needs.
    """
    num_bytes = layout.num_tiles * BLOCK * BLOCK
    if not (elapsed.keys_T.is_cuda and HAS_TRITON) or num_bytes > MAX_TILE_BYTES or len(elapsed.boundaries) > 255:
        return elapsed
    from tackboard.ops.packed_attention_triton import bucket_tiles

    return dataclasses.replace(elapsed, tiles=bucket_tiles(elapsed, layout))


def choose(q_THd: torch.Tensor, layout: RowLayout, weighing: Weighing) -> str:
    """Returns how attention is computed: `varlen`, `triton` or `grouped`."""
    if not q_THd.is_cuda:
        return "grouped"
    width = q_THd.shape[2]
    if weighing.dropout or width * q_THd.element_size() > MAX_HEAD_BYTES:
        return "grouped"
    # Flash Attention needs heads whose size is a multiple of 16 bytes (8 numbers of 2 bytes).
    has_varlen = weighing.is_plain and q_THd.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0
    if has_varlen and not (layout.is_short and HAS_TRITON):
        return "varlen"
    return "triton" if HAS_TRITON else "grouped"


def varlen_attention(q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Returns softmax attention by torch's kernel for packed rows. The kernel exists on GPUs only, in bf16 and fp16."""
    # The import is here and not at the top, because it imports torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    offsets, bound = layout.offsets, layout.bound
    causal = (-1, 0)  # all tokens to the left, none to the right
    read_THd = varlen_attn(q_THd, k_THd, v_THd, offsets, offsets, bound, bound, window_size=causal)
    assert isinstance(read_THd, torch.Tensor)
    return read_THd
