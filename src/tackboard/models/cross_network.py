"""Defines DCN-v2's cross layers, which multiply features with each other explicitly.

The input x₀ [C, F] holds all features of a candidate, end to end. Each layer multiplies x₀, element by element, with a
linear map of its own input, and adds this input. So l layers express products of up to l + 1 features:

    xᵢ₊₁ = x₀ ∘ (W xᵢ + b) + xᵢ

Shapes: C candidates, F width of all features.
"""

from __future__ import annotations

import torch
from torch import nn


class CrossNetwork(nn.Module):
    """A stack of cross layers with full matrices. Without layers it returns its input."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, features_CF: torch.Tensor) -> torch.Tensor:
        crossed_CF = features_CF
        for layer in self.layers:
            crossed_CF = features_CF * layer(crossed_CF) + crossed_CF
        return crossed_CF
