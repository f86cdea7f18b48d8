"""The decoder: a GPT-2-style, pre-norm, causal transformer over padded histories.

In: token vectors [B, S, D], right-padded. Out: hidden vectors of the same shape. Padding stands on the right and
attention is causal, so no real token ever sees a padded one and no mask is needed: that keeps the fast causal kernel.

Shapes: B rows, S positions, D width, H heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


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

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """One block."""
        x_BSD = x_BSD + self._drop(self._attend(self.attention_norm(x_BSD)))
        return x_BSD + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_BSD)), approximate="tanh")))

    def _attend(self, x_BSD: torch.Tensor) -> torch.Tensor:
        B, S, D = x_BSD.shape
        q, k, v = self.attention_in(x_BSD).view(B, S, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed_BHSd = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed_BHSd.transpose(1, 2).reshape(B, S, D))

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

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Hidden vectors of right-padded tokens; position s sees positions 0…s."""
        x_BSD = x_BSD + self.positions.weight[: x_BSD.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.final_norm(x_BSD)
