"""The decoder: a GPT-2-style, pre-norm, causal transformer over packed histories.

In: the tokens of all histories end to end [T, D], and where each history begins. Out: hidden vectors of the same
shape. Everything that looks at one token alone runs on the packed tokens; only attention lays them out as a grid
[B, S], right-padded. Padding stands on the right and attention is causal, so no token ever sees a padded one and no
mask is needed: that keeps the fast causal kernel. With histories of 5 to 64 events the grid is twice as large as the
tokens in it, so packing halves the work of the layers.

Shapes: T packed tokens, B rows, S positions, D width, H heads, d width of a head.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where packed tokens lie in a padded grid: `places` [T] within their row, `cells` [T] in the grid of B × S."""

    num_rows: int
    longest: int
    places: torch.Tensor
    cells: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths_B: torch.Tensor) -> Packing:
        """The packing of rows of these lengths."""
        longest = int(lengths_B.max()) if len(lengths_B) else 0
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
        first_B = torch.cumsum(lengths_B, 0) - lengths_B
        places_T = torch.arange(len(rows_T), device=lengths_B.device) - first_B[rows_T]
        return cls(len(lengths_B), longest, places_T, rows_T * longest + places_T)

    def spread(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Packed tokens as a grid [B, S, D], zeros where there is none."""
        grid = x_TD.new_zeros(self.num_rows * self.longest, x_TD.shape[1]).index_copy(0, self.cells, x_TD)
        return grid.view(self.num_rows, self.longest, -1)

    def collect(self, grid_BSD: torch.Tensor) -> torch.Tensor:
        """The tokens of a grid, packed [T, D]."""
        return grid_BSD.flatten(0, 1).index_select(0, self.cells)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp_ratio * width)
        self.mlp_out = nn.Linear(mlp_ratio * width, width)

    def forward(self, x_TD: torch.Tensor, packing: Packing) -> torch.Tensor:
        """One block."""
        x_TD = x_TD + self._drop(self._attend(self.attention_norm(x_TD), packing))
        return x_TD + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_TD)), approximate="tanh")))

    def _attend(self, x_TD: torch.Tensor, packing: Packing) -> torch.Tensor:
        grid = packing.spread(self.attention_in(x_TD))
        B, S, three_D = grid.shape
        q, k, v = grid.view(B, S, 3, self.num_heads, three_D // (3 * self.num_heads)).permute(2, 0, 3, 1, 4)
        mixed_BHSd = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(packing.collect(mixed_BHSd.transpose(1, 2).flatten(2)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Decoder(nn.Module):
    """A stack of blocks with learned positions and a final LayerNorm."""

    def __init__(
        self, *, width: int, num_layers: int, num_heads: int, mlp_ratio: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__()
        self.positions = nn.Embedding(max_positions, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, mlp_ratio, dropout) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width)
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        """GPT-2's: normal with 0.02, the layers that write into the residual scaled down by its depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            depth_scale = (2 * num_layers) ** -0.5 if name.endswith(("attention_out.weight", "mlp_out.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * depth_scale)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Hidden vectors of packed tokens; a token sees itself and those before it in its row."""
        packing = Packing.from_lengths(lengths_B)
        x_TD = x_TD + functional.embedding(packing.places, self.positions.weight)
        for block in self.blocks:
            x_TD = block(x_TD, packing)
        return self.final_norm(x_TD)
