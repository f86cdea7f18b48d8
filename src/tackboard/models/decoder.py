"""Defines the decoder: a GPT-2-style, pre-norm, causal transformer over packed histories.

The decoder takes the tokens of all histories end to end [T, D] and the length of each history, and returns hidden
vectors of the same shape. All layers except attention work on single tokens and run on the packed tokens, so they do no
work for padding. Attention also takes and returns packed tokens. `ops.packed_attention` chooses how it is computed: by
kernels for packed rows on a GPU, and on a CPU by padded grids, each of rows of similar length.

The backbone reads the order of tokens in one of three ways. `learned` adds a vector per position to the tokens, and no
row may be longer than the number of these vectors. `rotary` rotates queries and keys by their position, so that
attention reads distances and a row may be longer than any row of training. `none` adds nothing.

Time enters through `time_bias` buckets: each pair of query and key gets a learned number per head, chosen by the time
from the key to the query (see `LayerStack.forward`). On a CPU the bias has a cost: it is a tensor as large as the
scores, which attention without a bias never holds in memory. Memory stays bounded (`ops.packed_attention_reference`),
but time grows with the square of the length: a step over one history of 16,000 tokens takes about ten times as long
with the bias as without it. Without the bias, memory is linear in the length.

Shapes: T packed tokens, B rows, D width, H heads, d width of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch.cross_layout import CrossLayout
from tackboard.batch.row_layout import RowLayout
from tackboard.core.config import check
from tackboard.core.errors import DataError
from tackboard.models.time_encoding import log2_boundaries
from tackboard.ops.crossed_attention import crossed_attention
from tackboard.ops.newest_attention import newest_attention
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


class AttentionLayer(nn.Module):
    """A layer in three parts: `project` before attention, attention itself, and `finish` after it.

    `project` takes tokens [T, D]. It returns queries, keys and values [T, H, d], and one more tensor, or None, for
    `finish`. `finish` takes the tokens, the result of attention for each token [T, H, d], and this further tensor.
    Candidates (`LayerStack.cross`) go through the same `project` and `finish`, so they use the same weights.
    """

    compiles = True

    def project(
        self, x_TD: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    def finish(self, x_TD: torch.Tensor, read_THd: torch.Tensor, rest_TE: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def weighing(self, elapsed: Elapsed | None) -> Weighing:
        """Returns how attention turns scores into weights. `elapsed` is None for a backbone without a time bias."""
        raise NotImplementedError

    def forward(
        self,
        x_TD: torch.Tensor,
        layout: RowLayout,
        rotation: Rotation | None = None,
        elapsed: Elapsed | None = None,
    ) -> torch.Tensor:
        q_THd, k_THd, v_THd, rest_TE = self.project(x_TD, rotation)
        read_THd = packed_attention(q_THd, k_THd, v_THd, layout, self.weighing(elapsed))
        return self.finish(x_TD, read_THd, rest_TE)


class Block(AttentionLayer):
    """Attention followed by an MLP, each with a LayerNorm before it and a residual connection around it."""

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

    def project(
        self, x_TD: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        packed = self.attention_in(self.attention_norm(x_TD)).unflatten(1, (3 * self.num_heads, -1))
        query_key, v_THd = packed.tensor_split([2 * self.num_heads], dim=1)
        if rotation is not None:
            query_key = rotated(query_key, rotation)
        q_THd, k_THd = query_key.chunk(2, dim=1)
        return q_THd, k_THd, v_THd, None

    def finish(self, x_TD: torch.Tensor, read_THd: torch.Tensor, rest_TE: torch.Tensor | None) -> torch.Tensor:
        x_TD = x_TD + self._drop(self.attention_out(read_THd.flatten(1)))
        return x_TD + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_TD)), approximate="tanh")))

    def weighing(self, elapsed: Elapsed | None) -> Weighing:
        return SOFTMAX if elapsed is None else Weighing(time_bias_VH=self.time_bias, elapsed=elapsed)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


@dataclasses.dataclass(frozen=True)
class KeptTokens:
    """The keys and values of a row's first tokens, which later tokens of the row attend to."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of the tokens [T, H, d] in each layer."""
    times_T: torch.Tensor | None
    """The times of the tokens as keys, if the backbone reads times."""

    @property
    def num_tokens(self) -> int:
        return len(self.layers[0][0])

    @property
    def num_bytes(self) -> int:
        parts = [part for layer in self.layers for part in layer] + ([] if self.times_T is None else [self.times_T])
        return sum(part.numel() * part.element_size() for part in parts)

    def first(self, num_tokens: int) -> KeptTokens:
        """Returns a view of the first tokens."""
        if num_tokens == self.num_tokens:
            return self
        layers = [(k_THd[:num_tokens], v_THd[:num_tokens]) for k_THd, v_THd in self.layers]
        return KeptTokens(layers, None if self.times_T is None else self.times_T[:num_tokens])


@dataclasses.dataclass(frozen=True)
class ReadContext:
    """Context rows that a backbone has read: their layout, and the keys and values that candidates attend to."""

    layout: RowLayout
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of the context tokens [T, H, d] in each layer."""
    times_T: torch.Tensor | None
    """The times of the context tokens as keys, if the backbone reads times."""
    hidden_TD: torch.Tensor | None
    """The hidden vectors of the context tokens; None if the last layer was skipped."""

    def keep(self, num_tokens: int) -> KeptTokens:
        """Returns a copy of the keys, values and times of the first `num_tokens` tokens. There must be only one row."""
        # A clone is needed: keys and values may be views of a tensor that also holds the queries.
        layers = [(k_THd[:num_tokens].clone(), v_THd[:num_tokens].clone()) for k_THd, v_THd in self.layers]
        return KeptTokens(layers, None if self.times_T is None else self.times_T[:num_tokens].clone())


class LayerStack(nn.Module):
    """The part that all backbones share: it adds positions, calls the layers in turn, and applies a final LayerNorm.

    A subclass sets `layers` and `final_norm`. A layer is an `AttentionLayer`.
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
            x_TD, rotation, elapsed = self._entered(x_TD, layout, times_T, query_times_T)
            for layer in self.layers_in_order():
                x_TD = layer(x_TD, layout, rotation, elapsed)
        return x_TD if self.final_norm is None else self.final_norm(x_TD)

    def read_context(
        self,
        x_TD: torch.Tensor,
        layout: RowLayout,
        times_T: torch.Tensor | None = None,
        query_times_T: torch.Tensor | None = None,
        *,
        needs_hidden: bool = True,
    ) -> ReadContext:
        """Does the same as `forward`, and keeps the keys and values of every layer for `cross`.

        Candidates read only keys and values. So without `needs_hidden`, the last layer computes nothing else.
        """
        if not layout.num_tokens:
            return ReadContext(layout, [], times_T, x_TD)
        x_TD, rotation, elapsed = self._entered(x_TD, layout, times_T, query_times_T)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        layers: list[Any] = list(self.layers_in_order())
        for number, layer in enumerate(layers):
            q_THd, k_THd, v_THd, rest_TE = layer.project(x_TD, rotation)
            kept.append((k_THd, v_THd))
            if number + 1 == len(layers) and not needs_hidden:
                return ReadContext(layout, kept, times_T, None)
            read_THd = packed_attention(q_THd, k_THd, v_THd, layout, layer.weighing(elapsed))
            x_TD = layer.finish(x_TD, read_THd, rest_TE)
        return ReadContext(layout, kept, times_T, x_TD if self.final_norm is None else self.final_norm(x_TD))

    def extend_context(
        self,
        kept: KeptTokens,
        x_SD: torch.Tensor,
        layout: RowLayout,
        times_S: torch.Tensor | None = None,
        query_times_S: torch.Tensor | None = None,
    ) -> ReadContext:
        """Reads the S tokens after the kept tokens of one row, and returns the context of all tokens of the row.

        `layout` is the layout of the whole row. The result equals `read_context` of the whole row without
        `needs_hidden`, within rounding. Training does not use this method.
        """
        num_kept = kept.num_tokens
        times_T = times_S if times_S is None or kept.times_T is None else torch.cat([kept.times_T, times_S])
        x_SD, rotation = self._placed(x_SD, layout, layout.places[num_kept:])
        elapsed = self._elapsed(times_T, times_S if query_times_S is None else query_times_S)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        layers: list[Any] = list(self.layers_in_order())
        for number, (layer, (k_KHd, v_KHd)) in enumerate(zip(layers, kept.layers, strict=True)):
            q_SHd, k_SHd, v_SHd, rest_SE = layer.project(x_SD, rotation)
            k_THd, v_THd = torch.cat([k_KHd, k_SHd]), torch.cat([v_KHd, v_SHd])
            found.append((k_THd, v_THd))
            if number + 1 < len(layers):
                x_SD = layer.finish(x_SD, newest_attention(q_SHd, k_THd, v_THd, layer.weighing(elapsed)), rest_SE)
        return ReadContext(layout, found, times_T, None)

    def cross(
        self, x_CD: torch.Tensor, context: ReadContext, crossing: CrossLayout, times_C: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the hidden vectors of candidates [C, D], as if each were the only one at the end of its context row.

        `times_C` holds the times of the candidates in ms; a backbone with a time bias needs them.
        """
        if len(x_CD):
            if self.positions is not None:
                context.layout.check_fits(self.positions.num_embeddings - 1)
                x_CD = x_CD + functional.embedding(crossing.places, self.positions.weight)
            rotation = rotation_of(crossing.places, self.rotary_width) if self.rotary_width else None
            elapsed = None
            if self.num_buckets:
                assert context.times_T is not None and times_C is not None, "a time bias needs times"
                elapsed = Elapsed(context.times_T, times_C, self.boundaries_ms(times_C.device))
            layers: list[Any] = list(self.layers_in_order())
            for layer, (k_THd, v_THd) in zip(layers, context.layers, strict=True):
                q_CHd, k_CHd, v_CHd, rest_CE = layer.project(x_CD, rotation)
                read_CHd = crossed_attention(q_CHd, k_CHd, v_CHd, k_THd, v_THd, crossing, layer.weighing(elapsed))
                x_CD = layer.finish(x_CD, read_CHd, rest_CE)
        return x_CD if self.final_norm is None else self.final_norm(x_CD)

    def _entered(
        self, x_TD: torch.Tensor, layout: RowLayout, times_T: torch.Tensor | None, query_times_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rotation | None, Elapsed | None]:
        """Returns what the layers read: tokens with their positions, rotations, and elapsed times."""
        x_TD, rotation = self._placed(x_TD, layout, layout.places)
        elapsed = self._elapsed(times_T, times_T if query_times_T is None else query_times_T)
        return x_TD, rotation, None if elapsed is None else with_tiles(elapsed, layout)

    def _placed(
        self, x_TD: torch.Tensor, layout: RowLayout, places_T: torch.Tensor
    ) -> tuple[torch.Tensor, Rotation | None]:
        """Returns the tokens with positions added, and their rotations. `places_T` holds their places in the rows."""
        if self.positions is not None:
            layout.check_fits(self.positions.num_embeddings)
            x_TD = x_TD + functional.embedding(places_T, self.positions.weight)
        return x_TD, rotation_of(places_T, self.rotary_width) if self.rotary_width else None

    def _elapsed(self, times_T: torch.Tensor | None, asked_T: torch.Tensor | None) -> Elapsed | None:
        """Returns what a time bias reads, given the times of keys and of queries."""
        if not self.num_buckets:
            return None
        if times_T is None or asked_T is None:
            raise DataError("a backbone with a time bias was given no times", fix="add history.time to `reads`")
        return Elapsed(times_T, asked_T, self.boundaries_ms(times_T.device))


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
