"""Computes what candidates read: each candidate attends to the context of its request and to itself (DCAT's crossing).

Keys and values of a context row are computed once and serve all candidates of the request. The result equals causal
attention over the row with the candidate appended. A candidate sees no other candidate.

    context row  ▷ a b c     keys, values [T, H, d], computed once
    candidates   p           attends to ▷ a b c p
                 q           attends to ▷ a b c q

This is plain PyTorch for every device; `CrossLayout` lays the rows out in grids. A grid consists of pieces: groups of
candidates of one request. A grid of more than TILE_CELLS scores is computed a few pieces at a time, and the backward
pass computes these pieces again, so memory stays bounded.

Shapes: C candidates, T context tokens, H heads, d width of a head; of a grid: V pieces, c candidates, S tokens.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.batch.cross_layout import CrossGroup, CrossLayout
from tackboard.ops.packed_attention_reference import SOFTMAX, TILE_CELLS, Elapsed, Weighing
from tackboard.ops.small_table import small_table_rows


def crossed_attention(
    q_CHd: torch.Tensor,
    k_CHd: torch.Tensor,
    v_CHd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    layout: CrossLayout,
    weighing: Weighing = SOFTMAX,
) -> torch.Tensor:
    """Returns what each candidate reads, which is its weighted sum of values [C, H, d].

    `q_CHd`, `k_CHd` and `v_CHd` belong to the candidates, `k_THd` and `v_THd` to the context tokens. With a time bias,
    `weighing.elapsed` holds the times of the context tokens as keys [T] and of the candidates as queries [C]. The
    elapsed time from a candidate to itself is 0.
    """
    read = [_read_group(q_CHd, k_CHd, v_CHd, k_THd, v_THd, layout, group, weighing) for group in layout.groups]
    if not read:
        return torch.zeros_like(q_CHd)
    return torch.cat(read).index_select(0, layout.cells)


def _read_group(
    q_CHd: torch.Tensor,
    k_CHd: torch.Tensor,
    v_CHd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    layout: CrossLayout,
    group: CrossGroup,
    weighing: Weighing,
) -> torch.Tensor:
    of_piece = q_CHd.shape[1] * group.num_candidates * max(1, group.num_tokens)
    at_once = max(1, TILE_CELLS[q_CHd.device.type] // max(1, of_piece))
    parts = []
    for first in range(0, group.num_pieces, at_once):
        pieces = slice(first, min(first + at_once, group.num_pieces))
        read = functools.partial(_read_pieces, layout=layout, group=group, pieces=pieces, weighing=weighing)
        if at_once < group.num_pieces and torch.is_grad_enabled():
            parts.append(checkpoint(read, q_CHd, k_CHd, v_CHd, k_THd, v_THd, use_reentrant=False))
        else:
            parts.append(read(q_CHd, k_CHd, v_CHd, k_THd, v_THd))
    return torch.cat(parts)


def _read_pieces(
    q_CHd: torch.Tensor,
    k_CHd: torch.Tensor,
    v_CHd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    *,
    layout: CrossLayout,
    group: CrossGroup,
    pieces: slice,
    weighing: Weighing,
) -> torch.Tensor:
    """Returns what the candidate cells of some pieces read [V · c, H, d]."""
    candidates_Vc = _cells(layout.candidates, group.first_candidate_cell, group.num_candidates, pieces)
    tokens_VS = _cells(layout.tokens, group.first_token_cell, group.num_tokens, pieces)
    q, k_own, v_own = (_rows(part, candidates_Vc) for part in (q_CHd, k_CHd, v_CHd))  # [V, H, c, d]
    k, v = (_rows(part, tokens_VS) for part in (k_THd, v_THd))  # [V, H, S, d]
    scores_VHcS, own_VHc1 = q @ k.transpose(2, 3), (q * k_own).sum(dim=-1, keepdim=True)
    of_pieces = slice(group.first_piece + pieces.start, group.first_piece + pieces.stop)
    lengths_V1, first_V1 = layout.lengths[of_pieces, None], layout.first_visible[of_pieces, None]
    places_S = torch.arange(group.num_tokens, device=q.device)
    is_hidden_VS = (places_S >= lengths_V1) | (places_S < first_V1)
    if not weighing.pointwise_over:
        scale = q.shape[-1] ** -0.5
        scores_VHcS, own_VHc1 = scores_VHcS * scale, own_VHc1 * scale
    if weighing.position_bias_P is not None:
        distances_VS = (lengths_V1 - places_S).clamp(0, len(weighing.position_bias_P) - 1)
        bias_VS = small_table_rows(weighing.position_bias_P[:, None], distances_VS).squeeze(-1)
        scores_VHcS, own_VHc1 = scores_VHcS + bias_VS[:, None, None], own_VHc1 + weighing.position_bias_P[0]
    if weighing.time_bias_VH is not None:
        assert weighing.elapsed is not None, "a time bias needs elapsed times"
        buckets_VcS, own_bucket = _buckets(weighing.elapsed, candidates_Vc, tokens_VS)
        scores_VHcS = scores_VHcS + small_table_rows(weighing.time_bias_VH, buckets_VcS).permute(0, 3, 1, 2)
        own_VHc1 = own_VHc1 + functional.embedding(own_bucket, weighing.time_bias_VH).view(1, -1, 1, 1)
    is_hidden = is_hidden_VS[:, None, None]
    if weighing.pointwise_over:
        weights = functional.silu(scores_VHcS).masked_fill(is_hidden, 0.0) / weighing.pointwise_over
        own_weights = functional.silu(own_VHc1) / weighing.pointwise_over
    else:
        joined = torch.cat([scores_VHcS.masked_fill(is_hidden, float("-inf")), own_VHc1], dim=-1)
        joined = joined.softmax(dim=-1, dtype=torch.promote_types(joined.dtype, torch.float32))
        joined = functional.dropout(joined, weighing.dropout, weighing.dropout > 0)
        weights, own_weights = joined.split([group.num_tokens, 1], dim=-1)
    read_VHcd = weights.to(v.dtype) @ v + own_weights.to(v.dtype) * v_own
    return read_VHcd.transpose(1, 2).flatten(0, 1)


def _cells(index: torch.Tensor, first: int, width: int, pieces: slice) -> torch.Tensor:
    """Returns the part of an index tensor that belongs to some pieces of a grid, as a grid [V, width]."""
    begin, end = first + pieces.start * width, first + pieces.stop * width
    return index[begin:end].view(pieces.stop - pieces.start, width)


def _rows(x_THd: torch.Tensor, index_Vc: torch.Tensor) -> torch.Tensor:
    """Returns rows of `x_THd` as [V, H, c, d]."""
    # Unlike indexing, embedding() adds up gradients in a fixed order, so a resumed run repeats every bit.
    rows_VcE = functional.embedding(index_Vc, x_THd.flatten(1))
    return rows_VcE.unflatten(2, x_THd.shape[1:]).transpose(1, 2)


def _buckets(
    elapsed: Elapsed, candidates_Vc: torch.Tensor, tokens_VS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bucket of each pair of candidate and token [V, c, S], and the bucket of elapsed time 0."""
    waited_VcS = elapsed.queries_T[candidates_Vc][:, :, None] - elapsed.keys_T[tokens_VS][:, None]
    buckets = torch.bucketize(waited_VcS, elapsed.boundaries, right=True, out_int32=True)
    return buckets, torch.bucketize(torch.zeros_like(elapsed.queries_T[:1]), elapsed.boundaries, right=True)
