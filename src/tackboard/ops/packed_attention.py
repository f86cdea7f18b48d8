"""Computes causal attention of packed rows, in the fastest way that the device and the settings allow.

Queries, keys and values are packed tokens [T, H, d], and `RowLayout` says where rows lie. A token reads itself and the
tokens before it in its row. The output is what each token reads: its weighted sum of their values [T, H, d].

    device, setting                                           way
    CPU                                                       grids of rows of similar length (`_reference`)
    GPU, with dropout of weights or very wide heads           the same grids; a warning is logged
    GPU, everything else                                      our kernels (`_triton`); the grids if Triton is missing

Decided: our kernels also compute plain softmax attention. For rows of up to 4,096 tokens, torch's kernel for packed
rows (`varlen_attn`, Flash Attention 2) takes longer (`scripts/gpu_speed.py`, docs/performance.md).

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

__all__ = ["SOFTMAX", "Elapsed", "Weighing", "packed_attention", "with_tiles"]

MAX_HEAD_BYTES = 512
"""Widest head of our kernels: 256 numbers of 2 bytes, or 128 of 4 bytes."""

MAX_TILE_BYTES = 1 << 30
"""Largest memory of the stored buckets (of elapsed times) of a batch. Eight rows of 16,000 tokens take 1 GiB."""


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
    if choose(q_THd, weighing) == "triton":
        # Triton is imported only where it runs, so that the package works without it.
        from tackboard.ops.packed_attention_triton import triton_attention

        return triton_attention(q_THd, k_THd, v_THd, layout, weighing)
    return grouped_attention(q_THd, k_THd, v_THd, layout, weighing)


def with_tiles(elapsed: Elapsed, layout: RowLayout) -> Elapsed:
    """Returns the elapsed times with the buckets of all pairs, so that no layer searches for them again.

    Call this function before the layers. It does nothing if our kernels do not run. It also does nothing if a bucket
    does not fit into a byte or if the buckets do not fit into MAX_TILE_BYTES; then each program of our kernels searches
    for the buckets that it needs.
    """
    num_bytes = layout.num_tiles * BLOCK * BLOCK
    if not (elapsed.keys_T.is_cuda and HAS_TRITON) or num_bytes > MAX_TILE_BYTES or len(elapsed.boundaries) > 255:
        return elapsed
    from tackboard.ops.packed_attention_triton import bucket_tiles

    return dataclasses.replace(elapsed, tiles=bucket_tiles(elapsed, layout))


def choose(q_THd: torch.Tensor, weighing: Weighing) -> str:
    """Returns how attention is computed: `triton` or `grouped`."""
    is_narrow = q_THd.shape[2] * q_THd.element_size() <= MAX_HEAD_BYTES
    return "triton" if q_THd.is_cuda and HAS_TRITON and is_narrow and not weighing.dropout else "grouped"
