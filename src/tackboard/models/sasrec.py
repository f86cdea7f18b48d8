"""Defines SASRec's layers as a backbone. Each layer is causal attention followed by a pointwise network.

Input and output are those of `decoder.LayerStack`; times are ignored. As published, queries are computed from normed
tokens, but keys and values are computed from tokens without a norm. Dropout also applies to attention weights.

Shapes: T packed tokens, D width, H heads, d width of a head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch.row_layout import RowLayout
from tackboard.models.decoder import LayerStack, PositionEncoding
from tackboard.ops.packed_attention import Weighing, packed_attention


class SASRecLayer(nn.Module):
    """One layer: attention, then a pointwise network.

    Queries are computed from normed tokens. The output of attention is added to these normed tokens.
    """

    compiles = True

    def __init__(self, width: int, num_heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.attention_out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, ffn_width)
        self.ffn_out = nn.Linear(ffn_width, width)

    def forward(self, x_TD: torch.Tensor, layout: RowLayout, *_no_rotation_no_times: None) -> torch.Tensor:
        query_TD = self.query_norm(x_TD)
        k_TD, v_TD = self.key_value(x_TD).chunk(2, dim=1)
        q, k, v = (part_TD.unflatten(1, (self.num_heads, -1)) for part_TD in (self.query(query_TD), k_TD, v_TD))
        weighing = Weighing(dropout=self.dropout if self.training else 0.0)
        read_TD = self.attention_out(packed_attention(q, k, v, layout, weighing).flatten(1))
        y_TD = self.ffn_norm(query_TD + read_TD)
        return y_TD + self._drop(self.ffn_out(self._drop(functional.relu(self.ffn_in(y_TD)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class SASRec(LayerStack):
    """A stack of layers, with learned positions or without positions."""

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        num_heads: int,
        ffn_width: int,
        max_positions: int,
        dropout: float,
        positions: PositionEncoding = "learned",
        final_norm: bool = True,
    ) -> None:
        super().__init__(width, max_positions, positions)
        self.layers = nn.ModuleList(SASRecLayer(width, num_heads, ffn_width, dropout) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width) if final_norm else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
