"""HSTU: equal to its definition written out, causal, blind to company, defined where time runs backwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tackboard.batch.row_layout import RowLayout
from tackboard.core.errors import DataError
from tackboard.models.hstu import HSTU, HSTULayer
from tackboard.ops import packed_attention_reference as reference
from tackboard.ops.packed_attention import packed_attention

LENGTHS = [5, 0, 3]
TIMES = torch.tensor([0, 500, 4_000, 4_000, 90_000_000, 0, 7_000, 2_000_000])
ASKED = torch.tensor([500, 4_000, 4_000, 90_000_000, 90_100_000, 7_000, 2_000_000, 1_000_000_000])


def hstu_with(scale: float = 15.0, **settings: object) -> HSTU:
    """An HSTU of width 6 whose parameters are large enough for every effect to show."""
    torch.manual_seed(0)
    values = {"width": 6, "num_layers": 2, "num_heads": 2, "max_positions": 7, "dropout": 0.0}
    model = HSTU(**(values | settings)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("uvqk.weight", "_bias", "positions.weight")):
                parameter.mul_(scale)
    return model


def plain_silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def plain_layer(layer: HSTULayer, x: torch.Tensor, times: list[int], asked: list[int]) -> torch.Tensor:
    """One row through one layer, token by token and head by head."""
    assert layer.time_bias is not None
    size, d = layer.out.in_features, layer.out.in_features // layer.num_heads
    columns = [functional.silu(layer.uvqk.weight @ functional.layer_norm(token, token.shape, eps=1e-6)) for token in x]
    outputs = []
    for place, token in enumerate(x):
        gate = columns[place][:size]
        read = []
        for head in range(layer.num_heads):
            query = columns[place][2 * size + head * d :][:d]
            total = torch.zeros(d)
            for key in range(place + 1):
                key_vector = columns[key][3 * size + head * d :][:d]
                value = columns[key][size + head * d :][:d]
                seconds = max(1.0, (asked[place] - times[key]) / 1000)
                bias = layer.position_bias[min(place - key, layer.max_positions - 1)]
                bias = bias + layer.time_bias[int(math.log(seconds) / 0.301)]
                total = total + plain_silu(float(query @ key_vector + bias)) / layer.max_positions * value
            read.append(total)
        joined = torch.cat(read)
        outputs.append(token + layer.out(functional.layer_norm(joined, joined.shape, eps=1e-6) * gate))
    return torch.stack(outputs)


@pytest.mark.parametrize("tile_cells", [1 << 24, 1])
@pytest.mark.parametrize("settings", [{}, {"head_width": 4}, {"max_positions": 2}])
def test_equal_to_its_definition(monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], tile_cells: int) -> None:
    monkeypatch.setattr(reference, "TILE_CELLS", {"cpu": tile_cells, "cuda": tile_cells})
    model = hstu_with(positions="none", final_norm=False, **settings)
    x = torch.randn(8, 6)
    with torch.no_grad():
        found = model(x, torch.tensor(LENGTHS), TIMES, ASKED)
        for rows in (slice(0, 5), slice(5, 8)):
            expected = x[rows]
            for layer in model.layers:
                expected = plain_layer(layer, expected, TIMES[rows].tolist(), ASKED[rows].tolist())  # type: ignore[arg-type]
            assert torch.allclose(found[rows], expected, atol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("time_bias", [0, 128])
def test_causal_and_blind_to_company(positions: str, time_bias: int) -> None:
    model = hstu_with(positions=positions, time_bias=time_bias)
    x, lengths = torch.randn(8, 6), torch.tensor(LENGTHS)
    with torch.no_grad():
        together = model(x, lengths, TIMES, ASKED)
        alone = [
            model(x[rows], torch.tensor([len(x[rows])]), TIMES[rows], ASKED[rows]) for rows in (slice(5), slice(5, 8))
        ]
        assert torch.allclose(together, torch.cat(alone), atol=1e-5)
        changed, times, asked = x.clone(), TIMES.clone(), ASKED.clone()
        changed[3], times[3], asked[3] = torch.randn(6), 1, 77_000_000
        after = model(changed, lengths, times, asked)
    unaffected = [0, 1, 2, 5, 6, 7]
    assert torch.allclose(together[unaffected], after[unaffected], atol=1e-6)
    assert ((together - after)[3:5].abs().amax(dim=1) > 1e-5).all()


def test_tiles_change_neither_result_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = torch.randn(8, 6), []
    for cells in (1 << 24, 30, 1):
        monkeypatch.setattr(reference, "TILE_CELLS", {"cpu": cells, "cuda": cells})
        model = hstu_with()
        hidden = model(x, torch.tensor(LENGTHS), TIMES, ASKED)
        hidden.pow(3).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        results.append(torch.cat([tensor.flatten() for tensor in (hidden.detach(), *gradients) if tensor is not None]))
    scale = results[0].abs().clamp_min(1)
    assert all(((result - results[0]).abs() / scale).max() < 1e-4 for result in results[1:])


def test_time_that_runs_backwards_counts_as_none() -> None:
    model, x, lengths = hstu_with(), torch.randn(3, 6), torch.tensor([3])
    with torch.no_grad():
        backwards = model(x, lengths, torch.tensor([9_000_000, 5_000, -3_000_000]))
        assert torch.equal(backwards, model(x, lengths, torch.tensor([7, 7, 7])))
        assert not torch.allclose(backwards, model(x, lengths, torch.tensor([0, 9_000_000, 99_000_000])), atol=1e-4)


def test_what_a_token_reads_grows_with_the_keys_that_match_it() -> None:
    """The number of matching keys is what a softmax would lose."""
    layer = hstu_with(num_heads=1).layers[0]
    assert isinstance(layer, HSTULayer)
    ones = torch.ones(6, 1, 6)
    read = packed_attention(ones, ones, ones, RowLayout.of_lengths(torch.tensor([6])), layer.weighing(None))[:, 0, 0]
    assert (read[1:] > read[:-1] * 1.1).all()


def test_rows_may_be_longer_than_the_bias_reaches_unless_positions_are_learned() -> None:
    x, times = torch.randn(30, 6), torch.arange(30) * 1000
    assert torch.isfinite(hstu_with(positions="rotary", num_heads=3)(x, torch.tensor([30]), times)).all()
    with pytest.raises(DataError, match="a row has 30 tokens"):
        hstu_with()(x, torch.tensor([30]), times)


def test_dropout_acts_in_training_only() -> None:
    model, x = hstu_with(dropout=0.5), torch.randn(3, 6)
    run = lambda: model(x, torch.tensor([3]), TIMES[:3]).detach()  # noqa: E731
    assert torch.equal(run(), run())
    model.train()
    assert not torch.allclose(run(), run())


def test_half_precision_layers_stay_near_full_ones() -> None:
    x, model = torch.randn(8, 6), hstu_with(scale=5.0)
    full = model(x, torch.tensor(LENGTHS), TIMES, ASKED).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x, torch.tensor(LENGTHS), TIMES, ASKED)
    half.float().square().sum().backward()
    assert (half.detach() - full).abs().max() < 0.1
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
