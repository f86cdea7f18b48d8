"""Computes causal attention of packed rows in plain PyTorch: the path of the CPU, and the plain twin of the kernels.

Queries, keys and values are packed tokens [T, H, d]. The output is what each token reads: its weighted sum of values
[T, H, d]. Rows of similar length are laid out as a grid (`RowLayout.groups`), and attention runs grid by grid. As
attention is causal, no token sees the padding on the right of its row, and the padding needs no mask.

A bias is a tensor as large as the scores, one number for each query, key and head. Grids of more than TILE_CELLS scores
are computed in tiles, and the backward pass computes each tile again. So memory stays within about twenty tensors of 64
MiB each (512 MiB each on a GPU), while time grows with S². Without a bias, softmax attention holds no scores in memory.

Shapes: T packed tokens, C cells of all grids, B rows of a grid, S positions, H heads, d width of a head, V buckets of
time, P distances; of a tile, b rows, q queries, k keys.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.batch.row_layout import Group, RowLayout
from tackboard.ops.small_table import small_table_rows

_log = logging.getLogger(__name__)

TILE_CELLS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Largest number of cells (one per query, key and head) whose scores or bias exist at one time. In fp32 these cells
take 64 MiB, or 512 MiB on a GPU."""


@dataclasses.dataclass(frozen=True)
class Elapsed:
    """Times of the tokens as keys and as queries in ms (int64), and the boundaries of the buckets of elapsed times."""

    keys_T: torch.Tensor
    queries_T: torch.Tensor
    boundaries: torch.Tensor
    """Times in ms, ascending. The bucket of an elapsed time is the number of boundaries at or below it."""
    grids: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """First cell of a grid → the grid's buckets, computed once, because all layers read the same buckets."""
    tiles: torch.Tensor | None = None
    """The buckets of all pairs, in the order of our kernels; see `packed_attention.with_tiles`."""


@dataclasses.dataclass(frozen=True)
class Weighing:
    """How scores become weights: the biases that are added to ⟨q, k⟩, and the function that is applied to the sum."""

    pointwise_over: int = 0
    """0 means the softmax of ⟨q, k⟩ / √d + bias. Any other number n means silu(⟨q, k⟩ + bias) / n."""
    position_bias_P: torch.Tensor | None = None
    """The bias for each distance from key to query. Keys that are farther away than P - 1 get the last number."""
    time_bias_VH: torch.Tensor | None = None
    """The bias for each bucket of elapsed time: one per head [V, H], or the same for all heads [V, 1]."""
    elapsed: Elapsed | None = None
    """The elapsed times; needed with a time bias."""
    dropout: float = 0.0
    """Share of the weights that are dropped. Only a softmax without a bias may drop weights."""

    def __post_init__(self) -> None:
        assert self.is_plain or not self.dropout, "weights with a bias are never dropped"

    @property
    def is_plain(self) -> bool:
        """Whether this is softmax attention without a bias."""
        return not self.pointwise_over and self.position_bias_P is None and self.time_bias_VH is None


SOFTMAX = Weighing()


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a grid: some rows, some of their queries, and all keys up to the last of these queries."""

    rows: slice
    queries: slice

    @property
    def keys(self) -> slice:
        """The keys that at least one query of the tile may see."""
        return slice(0, self.queries.stop)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tile], torch.Tensor]
"""Takes queries [b, H, q, d], keys and values [b, H, k, d], and their tile. Returns what the queries read [b, H, q,
d]."""


def grouped_attention(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    layout: RowLayout,
    weighing: Weighing = SOFTMAX,
) -> torch.Tensor:
    """Returns what each token reads [T, H, d], computed group by group."""
    return _run(q_THd, k_THd, v_THd, layout, weighing)


def keep_groups_out_of_compilation() -> None:
    """Makes compiled layers call this module as plain Python. Call this function before layers are compiled.

    The number of groups differs from batch to batch, so a compiled loop over groups would be compiled again and again.
    This is not a decorator, because a decorator would import torch's compiler in every process, which takes seconds.
    """
    global _run
    _run = torch.compiler.disable(_attend_in_groups)


def _attend_in_groups(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, layout: RowLayout, weighing: Weighing
) -> torch.Tensor:
    if q_THd.is_cuda:
        _say_once()
    sizes = [group.num_cells for group in layout.groups]
    parts = [_Spread.apply(part_THd, layout.tokens, layout.cells).split(sizes) for part_THd in (q_THd, k_THd, v_THd)]
    read = []
    for group, *grids in zip(layout.groups, *parts, strict=True):
        q, k, v = (grid.view(group.num_rows, group.length, *grid.shape[1:]).transpose(1, 2) for grid in grids)
        read.append(_attend_in_grid(q, k, v, layout, group, weighing).transpose(1, 2).flatten(0, 1))
    read_CHd = torch.cat(read) if len(read) > 1 else (read[0] if read else v_THd)
    collected: torch.Tensor = _Collect.apply(read_CHd, layout.tokens, layout.cells)
    return collected


_run: Callable[..., torch.Tensor] = _attend_in_groups


@functools.cache
def _say_once() -> None:
    _log.warning(
        "attention on the GPU runs on padded grids, which is slower than our kernels. The reason is dropout of weights "
        "or heads of more than 512 bytes, or Triton is not installed"
    )


def _attend_in_grid(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: RowLayout, group: Group, weighing: Weighing
) -> torch.Tensor:
    if weighing.is_plain:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=weighing.dropout)
    return attend_in_tiles(functools.partial(_attend_in_tile, layout, group, weighing), q, k, v)


def _attend_in_tile(
    layout: RowLayout,
    group: Group,
    weighing: Weighing,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    buckets_bqk = None
    if weighing.time_bias_VH is not None:
        assert weighing.elapsed is not None, "a time bias needs elapsed times"
        buckets_bqk = _buckets_of(weighing.elapsed, layout, group, tile)
    return attend_with_mask(q, k, v, weighing, buckets_bqk)


def attend_with_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weighing: Weighing, buckets_bqk: torch.Tensor | None
) -> torch.Tensor:
    """Returns what queries [b, H, q, d] read; they are the newest tokens among the keys [b, H, k, d].

    `buckets_bqk` holds the buckets of elapsed times; needed with a time bias.
    """
    distances_qk = distances_of(q, k)
    bias = None
    if weighing.position_bias_P is not None:
        last = len(weighing.position_bias_P) - 1
        bias = small_table_rows(weighing.position_bias_P[:, None], distances_qk.clamp(0, last)).squeeze(-1)
    if weighing.time_bias_VH is not None:
        assert buckets_bqk is not None, "a time bias needs buckets"
        by_time_bHqk = small_table_rows(weighing.time_bias_VH, buckets_bqk).permute(0, 3, 1, 2)
        bias = by_time_bHqk if bias is None else bias + by_time_bHqk
    if weighing.pointwise_over:
        scores_bHqk = q @ k.transpose(2, 3)
        weights_bHqk = functional.silu(scores_bHqk if bias is None else scores_bHqk + bias) / weighing.pointwise_over
        return weights_bHqk.masked_fill(distances_qk < 0, 0.0).to(v.dtype) @ v
    bias = distances_qk.new_zeros(distances_qk.shape, dtype=q.dtype) if bias is None else bias
    bias = bias.masked_fill(distances_qk < 0, float("-inf")).to(q.dtype).contiguous()
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=weighing.dropout)


def distances_of(q_bHqd: torch.Tensor, k_bHkd: torch.Tensor) -> torch.Tensor:
    """Returns the distance from each key to each query of a tile [q, k]; it is negative if the key comes later."""
    num_queries, num_keys = q_bHqd.shape[2], k_bHkd.shape[2]
    keys_k = torch.arange(num_keys, device=q_bHqd.device)
    return torch.arange(num_queries, device=q_bHqd.device)[:, None] + (num_keys - num_queries) - keys_k


def tiles_of(num_rows: int, num_heads: int, length: int, most: int) -> list[Tile]:
    """Cuts the grid into tiles of at most `most` cells: several small rows, or some queries of one large row."""
    of_row = num_heads * length * length
    if of_row <= most:
        step = max(1, most // max(1, of_row))
        return [Tile(slice(row, min(row + step, num_rows)), slice(0, length)) for row in range(0, num_rows, step)]
    step = max(1, most // (num_heads * length))
    return [
        Tile(slice(row, row + 1), slice(query, min(query + step, length)))
        for row in range(num_rows)
        for query in range(0, length, step)
    ]


def attend_in_tiles(attend: Attend, q_BHSd: torch.Tensor, k_BHSd: torch.Tensor, v_BHSd: torch.Tensor) -> torch.Tensor:
    """Calls `attend` tile by tile; returns [B, H, S, d]. With several tiles, the backward pass computes them again."""
    B, H, S, _ = q_BHSd.shape
    tiles = tiles_of(B, H, S, TILE_CELLS[q_BHSd.device.type])
    if len(tiles) == 1:
        return attend(q_BHSd, k_BHSd, v_BHSd, tiles[0])
    rows: dict[int, list[torch.Tensor]] = {}
    for tile in tiles:
        parts = (q_BHSd[tile.rows, :, tile.queries], k_BHSd[tile.rows, :, tile.keys], v_BHSd[tile.rows, :, tile.keys])
        if torch.is_grad_enabled():
            mixed_bHqd = checkpoint(attend, *parts, tile, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed_bHqd = attend(*parts, tile)
        rows.setdefault(tile.rows.start, []).append(mixed_bHqd)
    return torch.cat([torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in rows.values()])


def _buckets_of(elapsed: Elapsed, layout: RowLayout, group: Group, tile: Tile) -> torch.Tensor:
    """Returns the buckets of a tile [b, q, k]. The buckets of small grids are computed once, for all layers."""
    num_kept = sum(grid.numel() for grid in elapsed.grids.values())
    keep = num_kept + group.num_cells * group.length <= TILE_CELLS[elapsed.keys_T.device.type]
    if group.first_cell in elapsed.grids:
        return elapsed.grids[group.first_cell][tile.rows, tile.queries, tile.keys]
    tokens_BS = layout.tokens[group.first_cell :][: group.num_cells].view(group.num_rows, group.length)
    part = Tile(slice(0, group.num_rows), slice(0, group.length)) if keep else tile
    queries_bq = elapsed.queries_T[tokens_BS[part.rows, part.queries]]
    keys_bk = elapsed.keys_T[tokens_BS[part.rows, part.keys]]
    waited_bqk = queries_bq[:, :, None] - keys_bk[:, None, :]
    buckets = torch.bucketize(waited_bqk, elapsed.boundaries, right=True, out_int32=True)
    if not keep:
        return buckets
    elapsed.grids[group.first_cell] = buckets
    return buckets[tile.rows, tile.queries, tile.keys]


class _Spread(torch.autograd.Function):
    """Lays packed tokens out in cells. A padded cell holds a copy of a token, and its gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x_THd: torch.Tensor, tokens_C: torch.Tensor, cells_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cells_T)
        return x_THd.index_select(0, tokens_C)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (cells_T,) = ctx.saved_tensors
        return gradients[0].index_select(0, cells_T), None, None


class _Collect(torch.autograd.Function):
    """Returns the tokens of the cells, packed and without the padding."""

    @staticmethod
    def forward(ctx: Any, grids_CHd: torch.Tensor, tokens_C: torch.Tensor, cells_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens_C, cells_T)
        return grids_CHd.index_select(0, cells_T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens_C, cells_T = ctx.saved_tensors
        is_token_C = torch.zeros(len(tokens_C), dtype=torch.bool, device=tokens_C.device)
        is_token_C = is_token_C.index_fill_(0, cells_T.long(), 1)
        spread_CHd = gradients[0].index_select(0, tokens_C)
        return spread_CHd.mul_(is_token_C[:, None, None]), None, None
