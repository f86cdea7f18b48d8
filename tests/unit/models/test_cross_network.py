"""DCN-v2's cross layers against their definition."""

from __future__ import annotations

import torch

from tackboard.models.cross_network import CrossNetwork


@torch.no_grad()
def test_each_layer_multiplies_the_input_once_more() -> None:
    torch.manual_seed(0)
    network, x = CrossNetwork(3, 2), torch.randn(4, 3)
    expected = x
    for layer in network.layers:
        rows = [[x[row, i] * (layer.weight[i] @ expected[row] + layer.bias[i]) for i in range(3)] for row in range(4)]
        expected = torch.tensor(rows) + expected
    assert torch.allclose(network(x), expected, atol=1e-6)


def test_without_layers_nothing_changes() -> None:
    x = torch.randn(2, 5)
    assert CrossNetwork(5, 0)(x) is x
