"""Computes what the newest tokens of one row read, if keys and values of the row's earlier tokens were kept.

This is plain PyTorch for every device. The result equals that of `packed_attention` for the same tokens, within
rounding. At most TILE_CELLS scores exist at a time, so memory stays bounded. Gradients cannot flow back through tokens
that were kept, so training does not use this function.

Shapes: T tokens of the row, S newest tokens, H heads, d width of a head.
"""

from __future__ import annotations

import torch

from tackboard.ops.packed_attention_reference import SOFTMAX, TILE_CELLS, Weighing, attend_with_mask


def newest_attention(
    q_SHd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, weighing: Weighing = SOFTMAX
) -> torch.Tensor:
    """Returns what the newest S of T tokens read [S, H, d]: each reads itself and all tokens before it.

    With a time bias, `weighing.elapsed` holds the times of all tokens as keys [T], and of the newest as queries [S].
    """
    num_new, num_heads, _ = q_SHd.shape
    num_kept = len(k_THd) - num_new
    q, k, v = (part.transpose(0, 1)[None] for part in (q_SHd, k_THd, v_THd))
    at_once = max(1, TILE_CELLS[q.device.type] // max(1, num_heads * len(k_THd)))
    parts = []
    for first in range(0, num_new, at_once):
        queries = slice(first, min(first + at_once, num_new))
        keys = slice(0, num_kept + queries.stop)
        buckets_1qk = None
        if weighing.time_bias_VH is not None:
            assert weighing.elapsed is not None, "a time bias needs elapsed times"
            waited_qk = weighing.elapsed.queries_T[queries, None] - weighing.elapsed.keys_T[keys]
            buckets_1qk = torch.bucketize(waited_qk, weighing.elapsed.boundaries, right=True, out_int32=True)[None]
        parts.append(attend_with_mask(q[:, :, queries], k[:, :, keys], v[:, :, keys], weighing, buckets_1qk))
    return torch.cat(parts, dim=2)[0].transpose(0, 1) if parts else torch.zeros_like(q_SHd)
