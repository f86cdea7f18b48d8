"""Defines the decoder: a GPT-2-style, pre-norm, causal transformer over packed histories.

The decoder takes the tokens of all histories end to end [T, D] and the length of each history, and returns hidden
vectors of the same shape. All layers except attention work on single tokens and run on the packed tokens. Attention
lays the tokens out as a grid [B, S], padded on the right. Because attention is causal, no token ever sees the padding.
So no mask is needed, and the fast causal kernel can be used. With histories of 5 to 64 events the grid has about twice
as many cells as there are tokens, so packing halves the work of everything but attention.

The order of tokens enters in one of three ways. `learned` adds a vector per position to the tokens, and no row may be
longer than the number of these vectors. `rotary` rotates queries and keys by their position, so that attention reads
distances and a row may be longer than any row of training. `none` adds nothing.

Time enters through `time_bias` buckets: each pair of query and key gets a learned number per head, chosen by the time
from the key to the query (see `LayerStack.forward`). The bias has a cost: it is a tensor of the whole grid [B, H, S,
S], which attention without a bias never holds in memory. Grids of more than TILE_CELLS numbers are computed in tiles,
and the backward pass computes each tile again. So the bias needs memory for about twenty tensors of 64 MiB each (512
MiB each on a GPU). Time grows with S². A step over one history of 16,000 tokens takes about ten times as long with the
bias as without it. Without the bias, memory is linear in the length.

Shapes: T packed tokens, B rows, S positions, D width, H heads, d width of a head; of a tile, b rows, q queries, k keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tackboard.core.config import check
from tackboard.core.errors import DataError
from tackboard.models.time_encoding import log2_bucket
from tackboard.ops.small_table import small_table_rows

TILE_CELLS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Largest number of cells (one per query, key and head) whose scores or bias exist at one time. In fp32 these cells
take 64 MiB, or 512 MiB on a GPU."""
ROTARY_BASE = 10_000.0

PositionEncoding = Literal["learned", "rotary", "none"]
POSITIONS: tuple[str, ...] = get_args(PositionEncoding)
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's angles [T, 1, d/2]."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Maps packed tokens to a padded B × S grid: `places` [T] are positions in a row, `cells` [T] cells of the grid."""

    num_rows: int
    longest: int
    places: torch.Tensor
    cells: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths_B: torch.Tensor) -> Packing:
        longest = int(lengths_B.max()) if len(lengths_B) else 0
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
        first_B = torch.cumsum(lengths_B, 0) - lengths_B
        places_T = torch.arange(len(rows_T), device=lengths_B.device) - first_B[rows_T]
        return cls(len(lengths_B), longest, places_T, rows_T * longest + places_T)

    def spread(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Lays packed tokens out as a grid [B, S, D], with zeros in the padding."""
        grid = x_TD.new_zeros(self.num_rows * self.longest, x_TD.shape[1]).index_copy(0, self.cells, x_TD)
        return grid.view(self.num_rows, self.longest, -1)

    def collect(self, grid_BSD: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of a grid, packed without the padding [T, D]."""
        return grid_BSD.flatten(0, 1).index_select(0, self.cells)

    def check_fits(self, max_positions: int) -> None:
        """Raises DataError if a row has more tokens than there are learned positions."""
        if self.longest > max_positions:
            raise DataError(
                f"a row has {self.longest:,} tokens",
                allowed=f"allowed: at most {max_positions:,}, the positions that the model has learned",
                fix="read shorter histories, or build the model with rotary positions",
            )


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of the attention grid: some rows, some of their queries, and all keys up to the last of these queries."""

    rows: slice
    queries: slice

    @property
    def keys(self) -> slice:
        """The keys that at least one query of the tile may see."""
        return slice(0, self.queries.stop)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tile | None], torch.Tensor]
"""Takes queries [b, H, q, d], keys and values [b, H, k, d], and their tile, which is None for the whole grid. Returns
the vectors that the queries read [b, H, q, d]."""


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
    most = TILE_CELLS[q_BHSd.device.type]
    if most >= B * H * S * S:
        return attend(q_BHSd, k_BHSd, v_BHSd, None)
    tiles = tiles_of(B, H, S, most)
    rows: dict[int, list[torch.Tensor]] = {}
    for tile in tiles:
        parts = (q_BHSd[tile.rows, :, tile.queries], k_BHSd[tile.rows, :, tile.keys], v_BHSd[tile.rows, :, tile.keys])
        if torch.is_grad_enabled():
            mixed_bHqd = checkpoint(attend, *parts, tile, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed_bHqd = attend(*parts, tile)
        rows.setdefault(tile.rows.start, []).append(mixed_bHqd)
    return torch.cat([torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in rows.values()])


class ElapsedBuckets:
    """Computes the buckets of the times from keys to queries: once for a small grid, tile by tile for a large grid."""

    def __init__(
        self,
        packing: Packing,
        times_T: torch.Tensor,
        query_times_T: torch.Tensor | None,
        bucket: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.keys_BS = packing.spread(times_T[:, None]).squeeze(2)
        self.queries_BS = self.keys_BS if query_times_T is None else packing.spread(query_times_T[:, None]).squeeze(2)
        self.bucket = bucket
        self.everything = Tile(slice(0, packing.num_rows), slice(0, packing.longest))
        is_small = packing.num_rows * packing.longest**2 <= TILE_CELLS[times_T.device.type]
        self.whole_BSS = self._compute(self.everything) if is_small else None

    def of_tile(self, tile: Tile | None) -> torch.Tensor:
        """Returns the buckets of a tile [b, q, k], or of the whole grid if `tile` is None."""
        if self.whole_BSS is None:
            return self._compute(tile or self.everything)
        return self.whole_BSS if tile is None else self.whole_BSS[tile.rows, tile.queries, tile.keys]

    def _compute(self, tile: Tile) -> torch.Tensor:
        queries_bq, keys_bk = self.queries_BS[tile.rows, tile.queries], self.keys_BS[tile.rows, tile.keys]
        return self.bucket(queries_bq[:, :, None] - keys_bk[:, None, :]).int()


def rotation_of(places_T: torch.Tensor, head_width: int) -> Rotation:
    """Returns cosine and sine of the rotary angles: place / 10000^(2i/d) for the i-th pair of a head of width d."""
    pairs = torch.arange(head_width // 2, dtype=torch.float32, device=places_T.device)
    angles_Td = places_T[:, None].float() * ROTARY_BASE ** (-2.0 * pairs / head_width)
    return angles_Td.cos()[:, None], angles_Td.sin()[:, None]


def rotated(x_THd: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates each pair (i, i + d/2) of a head by its angle."""
    cosine, sine = rotation
    first, second = x_THd.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x_THd.dtype)


class Block(nn.Module):
    """Attention followed by an MLP, each with a LayerNorm before it and a residual connection around it."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, dropout: float, time_bias: int = 0) -> None:
        super().__init__()
        # A block with a time bias is not compiled: its compiled attention is suspected of a GPU fault (docs/log.md).
        self.compiles = time_bias == 0
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp_ratio * width)
        self.mlp_out = nn.Linear(mlp_ratio * width, width)
        self.time_bias = nn.Parameter(torch.zeros(time_bias, num_heads)) if time_bias else None

    def forward(
        self, x_TD: torch.Tensor, packing: Packing, rotation: Rotation | None, elapsed: ElapsedBuckets | None
    ) -> torch.Tensor:
        x_TD = x_TD + self._drop(self._attend(self.attention_norm(x_TD), packing, rotation, elapsed))
        return x_TD + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_TD)), approximate="tanh")))

    def _attend(
        self, x_TD: torch.Tensor, packing: Packing, rotation: Rotation | None, elapsed: ElapsedBuckets | None
    ) -> torch.Tensor:
        packed = self.attention_in(x_TD)
        if rotation is not None:
            query_key, value = packed.view(len(packed), 3 * self.num_heads, -1).tensor_split([2 * self.num_heads], 1)
            packed = torch.cat([rotated(query_key, rotation), value], dim=1).flatten(1)
        grid = packing.spread(packed)
        B, S, three_D = grid.shape
        q, k, v = grid.view(B, S, 3, self.num_heads, three_D // (3 * self.num_heads)).permute(2, 0, 3, 1, 4)
        if elapsed is None:
            mixed_BHSd = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed_BHSd = attend_in_tiles(functools.partial(self._attend_with_bias, elapsed), q, k, v)
        return self.attention_out(packing.collect(mixed_BHSd.transpose(1, 2).flatten(2)))

    def _attend_with_bias(
        self, elapsed: ElapsedBuckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile | None
    ) -> torch.Tensor:
        assert self.time_bias is not None
        bias_bqkH = small_table_rows(self.time_bias, elapsed.of_tile(tile))
        bias_bHqk = bias_bqkH.permute(0, 3, 1, 2).masked_fill(distances_of(q, k) < 0, float("-inf"))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_bHqk.to(q.dtype).contiguous())

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class LayerStack(nn.Module):
    """The part that all backbones share: it adds positions, calls the layers in turn, and applies a final LayerNorm.

    A subclass sets `layers` and `final_norm`. A layer takes (tokens, packing, rotation, elapsed).
    """

    layers: nn.ModuleList
    final_norm: nn.LayerNorm | None

    def __init__(
        self, width: int, max_positions: int, positions: PositionEncoding, *, head_width: int = 0, num_buckets: int = 0
    ) -> None:
        """`head_width` is the width of the heads that rotary positions rotate; `num_buckets` 0 means no time bias."""
        super().__init__()
        check(positions in POSITIONS, "model.backbone.positions", positions, ", ".join(POSITIONS))
        is_rotary = positions == "rotary"
        allowed = f"learned, none; rotary needs heads of even width, not {head_width}"
        check(not is_rotary or head_width % 2 == 0, "model.backbone.positions", positions, allowed)
        self.rotary_width = head_width if is_rotary else 0
        self.num_buckets = num_buckets
        self.positions = nn.Embedding(max_positions, width) if positions == "learned" else None

    def bucket(self, elapsed_ms: torch.Tensor) -> torch.Tensor:
        """Returns the bucket of the time bias for each elapsed time."""
        raise NotImplementedError

    def layers_in_order(self) -> nn.ModuleList:
        """Returns the layers. A subclass that stores them under another name overrides this method."""
        return self.layers

    def forward(
        self,
        x_TD: torch.Tensor,
        lengths_B: torch.Tensor,
        times_T: torch.Tensor | None = None,
        query_times_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the hidden vectors of packed tokens. A token sees itself and the tokens before it in its row.

        `times_T` (int64) holds the times of the tokens in ms; a backbone with a time bias needs them. `query_times_T`
        holds the times of the tokens as queries: for each token the time of the next event or of the request. Without
        `query_times_T` a query has the time of its own token.
        """
        packing = Packing.from_lengths(lengths_B)
        if packing.longest:
            x_TD = self._through_layers(x_TD, packing, times_T, query_times_T)
        return x_TD if self.final_norm is None else self.final_norm(x_TD)

    def _through_layers(
        self, x_TD: torch.Tensor, packing: Packing, times_T: torch.Tensor | None, query_times_T: torch.Tensor | None
    ) -> torch.Tensor:
        if self.positions is not None:
            packing.check_fits(self.positions.num_embeddings)
            x_TD = x_TD + functional.embedding(packing.places, self.positions.weight)
        rotation = rotation_of(packing.places, self.rotary_width) if self.rotary_width else None
        elapsed = None
        if self.num_buckets:
            if times_T is None:
                raise DataError("a backbone with a time bias was given no times", fix="add history.time to `reads`")
            elapsed = ElapsedBuckets(packing, times_T, query_times_T, self.bucket)
        for layer in self.layers_in_order():
            x_TD = layer(x_TD, packing, rotation, elapsed)
        return x_TD


class Decoder(LayerStack):
    """A stack of blocks; see the module's docstring for positions and time."""

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        num_heads: int,
        mlp_ratio: int,
        max_positions: int,
        dropout: float,
        positions: PositionEncoding = "learned",
        time_bias: int = 0,
        final_norm: bool = True,
    ) -> None:
        super().__init__(width, max_positions, positions, head_width=width // num_heads, num_buckets=time_bias)
        self.blocks = nn.ModuleList(Block(width, num_heads, mlp_ratio, dropout, time_bias) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width) if final_norm else None
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        """Initialises as GPT-2 does: std 0.02, divided by √(2 · layers) in maps before a residual sum; biases are 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            depth_scale = (2 * num_layers) ** -0.5 if name.endswith(("attention_out.weight", "mlp_out.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * depth_scale)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def bucket(self, elapsed_ms: torch.Tensor) -> torch.Tensor:
        return log2_bucket(elapsed_ms, self.num_buckets, per_second=1000)

    def layers_in_order(self) -> nn.ModuleList:
        """Returns the layers, which are called `blocks` because files of trained models use that name."""
        return self.blocks
