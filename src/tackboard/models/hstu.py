"""HSTU is a backbone whose attention weighs each key independently, without a softmax, and gates the result.

Input and output are those of `decoder.LayerStack`. For a token x, one layer computes:

    u, v, q, k = silu(linear(norm(x)))
    a = Σ silu(⟨q, kⱼ⟩ + bias of position + bias of time) / n · vⱼ      over the keys j up to the token itself
    x + linear(dropout(norm(a) · u))

A softmax would tell which keys matter most, but not how many keys matter. Here the sum grows if more keys match the
token. For that reason n is a constant: the largest length. The norms have no parameters. The heads of a layer share one
learned bias per distance in positions and one per bucket of time. All of this is as in the public code. With
`query_times_T`, the time between a key and a query runs from the key's event to the event after the query's event, or
to the request. This is also as in the public code.

Decided: keys farther away than `max_positions` get the bias of the farthest distance, and keys with a later time than
the query get time bucket 0 (the public code takes the absolute value of the time). `final_norm` is our addition, so
that backbones can be exchanged; models that score by cosines need no final norm. On a CPU, attention computes a score
for each query, key and head, in tiles (`ops.packed_attention_reference`). So memory is bounded, but time grows with the
square of the length.

Shapes: T packed tokens, D width, E width of all heads, H heads, d width of a head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tackboard.models.decoder import AttentionLayer, LayerStack, PositionEncoding, Rotation, rotated
from tackboard.models.time_encoding import hstu_boundaries
from tackboard.ops.packed_attention import Elapsed, Weighing

NORM_EPS = 1e-6
TIME_BUCKETS = 128


class HSTULayer(AttentionLayer):
    """One layer; `head_width` is the width of queries, keys, values and gates of each head."""

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

    def project(
        self, x_TD: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        normed_TD = functional.layer_norm(x_TD, x_TD.shape[1:], eps=NORM_EPS)
        u_TE, v_TE, q_TE, k_TE = functional.silu(self.uvqk(normed_TD)).chunk(4, dim=1)
        q_THd, k_THd, v_THd = (part_TE.unflatten(1, (self.num_heads, -1)) for part_TE in (q_TE, k_TE, v_TE))
        if rotation is not None:
            q_THd, k_THd = rotated(q_THd, rotation), rotated(k_THd, rotation)
        return q_THd, k_THd, v_THd, u_TE

    def finish(self, x_TD: torch.Tensor, read_THd: torch.Tensor, rest_TE: torch.Tensor | None) -> torch.Tensor:
        assert rest_TE is not None
        read_TE = read_THd.flatten(1)
        gated_TE = functional.layer_norm(read_TE, read_TE.shape[1:], eps=NORM_EPS) * rest_TE
        return x_TD + self.out(functional.dropout(gated_TE, self.dropout, self.training))

    def weighing(self, elapsed: Elapsed | None) -> Weighing:
        time_bias_V1 = None if elapsed is None or self.time_bias is None else self.time_bias[:, None]
        return Weighing(self.max_positions, self.position_bias, time_bias_V1, elapsed)


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

    def boundaries_ms(self, device: torch.device) -> torch.Tensor:
        return hstu_boundaries(self.num_buckets, device)
