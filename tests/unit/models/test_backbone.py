"""The decoder: causal, blind to company, equal to plain attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from tackboard.models.backbone import Block, Decoder, Packing


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(width=8, num_layers=2, num_heads=2, mlp_ratio=3, max_positions=7, dropout=0.5).eval()
    with torch.no_grad():  # fresh weights are so small that every effect would be lost in rounding
        for parameter in decoder.parameters():
            parameter.mul_(20 if parameter.dim() > 1 else 1)
    return decoder


def packed(decoder: Decoder, *rows: torch.Tensor) -> list[torch.Tensor]:
    """The decoder's output for rows of different lengths, given and returned one by one."""
    lengths = torch.tensor([len(row) for row in rows])
    return list(decoder(torch.cat(rows), lengths).detach().split(lengths.tolist()))


def test_a_position_sees_itself_and_what_came_before(decoder: Decoder) -> None:
    x = torch.randn(6, 8)
    changed = x.clone()
    changed[3] = torch.randn(8)
    (before,), (after,) = packed(decoder, x), packed(decoder, changed)
    assert torch.allclose(before[:3], after[:3], atol=1e-6)
    assert ((before[3:] - after[3:]).abs().amax(dim=1) > 1e-4).all()


def test_company_changes_nothing(decoder: Decoder) -> None:
    rows = [torch.randn(length, 8) for length in (4, 7, 1, 2)]
    for together, row in zip(packed(decoder, *rows), rows, strict=True):
        assert torch.allclose(together, packed(decoder, row)[0], atol=1e-6)


def test_positions_matter(decoder: Decoder) -> None:
    (hidden,) = packed(decoder, torch.randn(1, 8).repeat(4, 1))
    assert (hidden[1:] - hidden[:-1]).abs().amax(dim=1).min() > 1e-3


def test_packing_spreads_and_collects() -> None:
    packing = Packing.from_lengths(torch.tensor([2, 0, 3]))
    x = torch.arange(10.0).view(5, 2) + 1
    grid = packing.spread(x)
    assert grid[:, :, 0].tolist() == [[1, 3, 0], [0, 0, 0], [5, 7, 9]]
    assert torch.equal(packing.collect(grid), x)
    assert packing.places.tolist() == [0, 1, 0, 1, 2]


def test_attention_equals_its_definition() -> None:
    torch.manual_seed(1)
    block = Block(width=6, num_heads=2, mlp_ratio=2, dropout=0.0)
    lengths = [5, 3]
    x = torch.randn(sum(lengths), 6)
    expected = torch.zeros(sum(lengths), 6)
    for first, length in ((0, 5), (5, 3)):
        q, k, v = block.attention_in(x[first : first + length]).split(6, dim=-1)
        for head in range(2):
            part = slice(3 * head, 3 * head + 3)
            for place in range(length):
                weights = (k[: place + 1, part] @ q[place, part] / math.sqrt(3)).softmax(0)
                expected[first + place, part] = weights @ v[: place + 1, part]
    found = block._attend(x, Packing.from_lengths(torch.tensor(lengths)))
    assert torch.allclose(found, block.attention_out(expected), atol=1e-5)


def test_dropout_acts_in_training_only(decoder: Decoder) -> None:
    x = torch.randn(4, 8)
    assert torch.equal(packed(decoder, x)[0], packed(decoder, x)[0])
    decoder.train()
    torch.manual_seed(0)
    (first,) = packed(decoder, x)
    assert not torch.allclose(first, packed(decoder, x)[0])
    torch.manual_seed(0)
    assert torch.equal(first, packed(decoder, x)[0])


def test_initial_parameters_follow_gpt2() -> None:
    torch.manual_seed(0)
    decoder = Decoder(width=64, num_layers=8, num_heads=2, mlp_ratio=4, max_positions=50, dropout=0.0)
    parameters = dict(decoder.named_parameters())
    assert float(parameters["blocks.0.mlp_in.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(parameters["blocks.0.mlp_out.weight"].detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not any(parameter.any() for name, parameter in parameters.items() if name.endswith("bias"))
