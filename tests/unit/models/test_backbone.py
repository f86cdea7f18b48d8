"""The decoder: causal, blind to padding, equal to plain attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from tackboard.models.backbone import Block, Decoder


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(width=8, num_layers=2, num_heads=2, mlp_ratio=3, max_positions=7, dropout=0.5).eval()
    with torch.no_grad():  # fresh weights are so small that every effect would be lost in rounding
        for parameter in decoder.parameters():
            parameter.mul_(20 if parameter.dim() > 1 else 1)
    return decoder


def test_a_position_sees_itself_and_what_came_before(decoder: Decoder) -> None:
    x = torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, 3] = torch.randn(2, 8)
    before, after = decoder(x), decoder(changed)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert ((before[:, 3:] - after[:, 3:]).abs().amax(dim=(0, 2)) > 1e-4).all()


def test_right_padding_changes_nothing(decoder: Decoder) -> None:
    x = torch.randn(1, 4, 8)
    padded = torch.cat([x, torch.full((1, 3, 8), 99.0)], dim=1)
    assert torch.allclose(decoder(x), decoder(padded)[:, :4], atol=1e-6)


def test_positions_matter(decoder: Decoder) -> None:
    x = torch.randn(1, 1, 8).repeat(1, 4, 1)
    hidden = decoder(x)
    assert (hidden[0, 1:] - hidden[0, :-1]).abs().amax(dim=1).min() > 1e-3


def test_attention_equals_its_definition() -> None:
    torch.manual_seed(1)
    block = Block(width=6, num_heads=2, mlp_ratio=2, dropout=0.0)
    x = torch.randn(2, 5, 6)
    q, k, v = block.attention_in(x).split(6, dim=-1)
    expected = torch.zeros(2, 5, 6)
    for row in range(2):
        for head in range(2):
            part = slice(3 * head, 3 * head + 3)
            for place in range(5):
                weights = (k[row, : place + 1, part] @ q[row, place, part] / math.sqrt(3)).softmax(0)
                expected[row, place, part] = weights @ v[row, : place + 1, part]
    assert torch.allclose(block._attend(x), block.attention_out(expected), atol=1e-5)


def test_dropout_acts_in_training_only(decoder: Decoder) -> None:
    x = torch.randn(1, 4, 8)
    assert torch.equal(decoder(x), decoder(x))
    decoder.train()
    torch.manual_seed(0)
    first = decoder(x)
    assert not torch.allclose(first, decoder(x))
    torch.manual_seed(0)
    assert torch.equal(first, decoder(x))


def test_initial_parameters_follow_gpt2() -> None:
    torch.manual_seed(0)
    decoder = Decoder(width=64, num_layers=8, num_heads=2, mlp_ratio=4, max_positions=50, dropout=0.0)
    parameters = dict(decoder.named_parameters())
    assert float(parameters["blocks.0.mlp_in.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(parameters["blocks.0.mlp_out.weight"].detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not any(parameter.any() for name, parameter in parameters.items() if name.endswith("bias"))
