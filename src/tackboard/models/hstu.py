"""HSTU is a backbone whose attention weighs each key independently, without a softmax, and gates the result.

Input and output are those of `decoder.LayerStack`. For a token x, one layer computes:

    u, v, q, k = silu(linear(norm(x)))
    a = Σ silu(⟨q, kⱼ⟩ + bias of position + bias of time) / n · vⱼ      over the keys j up to the token itself
    x + linear(dropout(norm(a) · u))

A softmax would tell which keys matter most, but not how many keys matter. Here the sum grows if more keys match the
token. For that reason n is a constant, the largest length. The norms have no parameters. The heads of a layer share one
learned bias per distance in positions and one per bucket of time. All of this is as in the public code. With
`query_times_T`, the time is measured up to the event after the query, also as in that code.

Decided: keys farther away than `max_positions` get the bias of the farthest distance, and keys with a later time than
their query get time bucket 0 (the public code takes the absolute value of the time). `final_norm` is our addition, so
that backbones can be exchanged; models that score by cosines need no final norm. Attention scores are a tensor of B × H
× S × S numbers. Grids of more than TILE_CELLS numbers are computed in tiles, which the backward pass computes again. So
memory is bounded as for the decoder's time bias, and time grows with S².

Shapes: T packed tokens, B rows, S positions, D width, H heads of width d, E = H × d; a tile: b rows, q queries, k keys.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from tackboard.models.decoder import (
    ElapsedBuckets,
    LayerStack,
    Packing,
    PositionEncoding,
    Rotation,
    Tile,
    attend_in_tiles,
    distances_of,
    rotated,
)
from tackboard.models.time_encoding import hstu_bucket
from tackboard.ops.small_table import small_table_rows

NORM_EPS = 1e-6
TIME_BUCKETS = 128


class HSTULayer(nn.Module):
    """One layer; `head_width` is the width of queries, keys, values and gates of each head."""

    compiles = True

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        max_positions: int,
        dropout: float,
        time_bias: int,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.max_positions = max_positions
        self.dropout = dropout
        self.uvqk = nn.Linear(width, 4 * num_heads * head_width, bias=False)
        self.out = nn.Linear(num_heads * head_width, width)
        self.position_bias = nn.Parameter(torch.randn(max_positions) * 0.02)
        self.time_bias = nn.Parameter(torch.randn(time_bias) * 0.02) if time_bias else None
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self, x_TD: torch.Tensor, packing: Packing, rotation: Rotation | None, elapsed: ElapsedBuckets | None
    ) -> torch.Tensor:
        normed_TD = functional.layer_norm(x_TD, x_TD.shape[1:], eps=NORM_EPS)
        u, v, q, k = functional.silu(self.uvqk(normed_TD)).chunk(4, dim=1)
        if rotation is not None:
            q, k = (rotated(part.unflatten(1, (self.num_heads, -1)), rotation).flatten(1) for part in (q, k))
        grids = [packing.spread(part).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v)]
        mixed_BHSd = attend_in_tiles(functools.partial(self._attend, elapsed), *grids)
        read_TE = packing.collect(mixed_BHSd.transpose(1, 2).flatten(2))
        gated_TE = functional.layer_norm(read_TE, read_TE.shape[1:], eps=NORM_EPS) * u
        return x_TD + self.out(functional.dropout(gated_TE, self.dropout, self.training))

    def _attend(
        self, elapsed: ElapsedBuckets | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile | None
    ) -> torch.Tensor:
        distances_qk = distances_of(q, k)
        bias = _looked_up(self.position_bias, distances_qk.clamp(0, self.max_positions - 1))
        if elapsed is not None and self.time_bias is not None:
            bias = bias + _looked_up(self.time_bias, elapsed.of_tile(tile))[:, None]
        weights_bHqk = functional.silu(q @ k.transpose(2, 3) + bias) / self.max_positions
        return weights_bHqk.masked_fill(distances_qk < 0, 0.0) @ v


class HSTU(LayerStack):
    """A stack of layers."""

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        num_heads: int,
        max_positions: int,
        dropout: float,
        positions: PositionEncoding = "learned",
        time_bias: int = TIME_BUCKETS,
        head_width: int = 0,
        final_norm: bool = True,
    ) -> None:
        """`time_bias` is the number of buckets (0: no time bias); a head width of 0 means width / num_heads."""
        head_width = head_width or width // num_heads
        super().__init__(width, max_positions, positions, head_width=head_width, num_buckets=time_bias)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.ModuleList(
            HSTULayer(width, num_heads, head_width, max_positions, dropout, time_bias) for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(width) if final_norm else None

    def bucket(self, elapsed_ms: torch.Tensor) -> torch.Tensor:
        return hstu_bucket(elapsed_ms, self.num_buckets)


def _looked_up(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns `weights[places]`. On a CPU the backward pass adds gradients in a fixed order, unlike plain indexing."""
    return small_table_rows(weights[:, None], places).squeeze(-1)
