"""Defines the decoder: a GPT-2-style, pre-norm, causal transformer over packed histories.

The decoder takes the tokens of all histories end to end [T, D] and the length of each history, and returns hidden
vectors of the same shape. All layers except attention work on single tokens and run on the packed tokens, so they do no
work for padding. Attention also takes and returns packed tokens. `ops.packed_attention` chooses how it is computed: by
kernels for packed rows on a GPU, and on a CPU by padded grids, each of rows of similar length.  The order of tokens
enters in one of three ways. `learned` adds a vector per position to the tokens, and no row may be longer than the
number of these vectors. `rotary` rotates queries and keys by their position, so that attention reads distances and a
row may be longer than any row of training. `none` adds nothing.

Time enters through `time_bias` buckets: each pair of query and key gets a learned number per head, chosen by the time
from the key to the query (see `LayerStack.forward`). On a CPU the bias has a cost: it is a tensor as large as the
scores, which attention without a bias never holds in memory. Memory stays bounded (`ops.packed_attention_reference`),
but time grows with the square of the length: a step over one history of 16,000 tokens takes about ten times as long
with the bias as without it. Without the bias, memory is linear in the length.

Shapes: T packed tokens, B rows, D width, H heads, d width of a head.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import check
from tackboard.core.errors import DataError
from tackboard.models.time_encoding import log2_boundaries
from tackboard.ops.packed_attention import SOFTMAX, Elapsed, Weighing, packed_attention, with_tiles

ROTARY_BASE = 10_000.0

PositionEncoding = Literal["learned", "rotary", "none"]
POSITIONS: tuple[str, ...] = get_args(PositionEncoding)
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's angles [T, 1, d/2]."""


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

    compiles = True

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, dropout: float, time_bias: int = 0) -> None:
        super().__init__()
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
        self, x_TD: torch.Tensor, layout: RowLayout, rotation: Rotation | None, elapsed: Elapsed | None
    ) -> torch.Tensor:
        x_TD = x_TD + self._drop(self._attend(self.attention_norm(x_TD), layout, rotation, elapsed))
        return x_TD + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_TD)), approximate="tanh")))

    def _attend(
        self, x_TD: torch.Tensor, layout: RowLayout, rotation: Rotation | None, elapsed: Elapsed | None
    ) -> torch.Tensor:
        packed = self.attention_in(x_TD).unflatten(1, (3 * self.num_heads, -1))
        query_key, v_THd = packed.tensor_split([2 * self.num_heads], dim=1)
        if rotation is not None:
            query_key = rotated(query_key, rotation)
        q_THd, k_THd = query_key.chunk(2, dim=1)
        weighing = SOFTMAX if elapsed is None else Weighing(time_bias_VH=self.time_bias, elapsed=elapsed)
        return self.attention_out(packed_attention(q_THd, k_THd, v_THd, layout, weighing).flatten(1))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class LayerStack(nn.Module):
    """The part that all backbones share: it adds positions, calls the layers in turn, and applies a final LayerNorm.

    A subclass sets `layers` and `final_norm`. A layer takes (tokens, layout, rotation, elapsed).
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

    def boundaries_ms(self, device: torch.device) -> torch.Tensor:
        """Returns the elapsed times at which the buckets of the time bias begin, except for the first bucket."""
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
        layout: RowLayout | None = None,
    ) -> torch.Tensor:
        """Returns the hidden vectors of packed tokens. A token sees itself and the tokens before it in its row.

        `times_T` (int64) holds the times of the tokens in ms; a backbone with a time bias needs them. `query_times_T`
        holds the times of the tokens as queries: for each token the time of the next event or of the request. Without
        `query_times_T` a query has the time of its own token. `layout` is the layout of the rows on the tokens'
        device. Without it, the layout is built from `lengths_B`; the host then waits for the device.
        """
        layout = RowLayout.of_lengths(lengths_B) if layout is None else layout
        if layout.num_tokens:
            x_TD = self._through_layers(x_TD, layout, times_T, query_times_T)
        return x_TD if self.final_norm is None else self.final_norm(x_TD)

    def _through_layers(
        self, x_TD: torch.Tensor, layout: RowLayout, times_T: torch.Tensor | None, query_times_T: torch.Tensor | None
    ) -> torch.Tensor:
        if self.positions is not None:
            layout.check_fits(self.positions.num_embeddings)
            x_TD = x_TD + functional.embedding(layout.places, self.positions.weight)
        rotation = rotation_of(layout.places, self.rotary_width) if self.rotary_width else None
        elapsed = None
        if self.num_buckets:
            if times_T is None:
                raise DataError("a backbone with a time bias was given no times", fix="add history.time to `reads`")
            asked_T = times_T if query_times_T is None else query_times_T
            elapsed = with_tiles(Elapsed(times_T, asked_T, self.boundaries_ms(times_T.device)), layout)
        for layer in self.layers_in_order():
            x_TD = layer(x_TD, layout, rotation, elapsed)
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
        """Initialises as GPT-2 does: std 0.02, or 0.02 / √(2 · layers) in front of a residual sum; biases are 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            depth_scale = (2 * num_layers) ** -0.5 if name.endswith(("attention_out.weight", "mlp_out.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * depth_scale)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def boundaries_ms(self, device: torch.device) -> torch.Tensor:
        return log2_boundaries(self.num_buckets, 1000, device)

    def layers_in_order(self) -> nn.ModuleList:
        """Returns the layers, which are called `blocks` because files of trained models use that name."""
        return self.blocks
