"""The decoder: causal, blind to company, equal to plain attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from tackboard.batch.row_layout import RowLayout
from tackboard.core.errors import ConfigError, DataError
from tackboard.models.decoder import Block, Decoder, Rotation, rotated, rotation_of
from tackboard.models.time_encoding import log2_boundaries
from tackboard.ops import packed_attention_reference as reference
from tackboard.ops.packed_attention import Elapsed, packed_attention

TIMES = torch.tensor([0, 500, 4_000, 4_000, 90_000_000, 0, 7_000, 2_000_000])
"""Of rows of 5 and 3 tokens."""
ASKED = torch.tensor([500, 4_000, 4_000, 90_000_000, 90_100_000, 7_000, 2_000_000, 1_000_000_000])
"""When those tokens ask: at the next one's time, the last of a row at that of a request."""


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


def attended(
    block: Block, x: torch.Tensor, layout: RowLayout, rotation: Rotation | None = None, elapsed: Elapsed | None = None
) -> torch.Tensor:
    """What the attention of a block adds to tokens that are normed already."""
    block.attention_norm = torch.nn.Identity()  # type: ignore[assignment]
    q, k, v, _ = block.project(x, rotation)
    return block.attention_out(packed_attention(q, k, v, layout, block.weighing(elapsed)).flatten(1))


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
    found = attended(block, x, RowLayout.of_lengths(torch.tensor(lengths)))
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


def decoder_with(scale: float = 20.0, **settings: object) -> Decoder:
    """A decoder of width 8 whose parameters are large enough for every effect to show."""
    torch.manual_seed(0)
    values = {"width": 8, "num_layers": 2, "num_heads": 2, "mlp_ratio": 3, "max_positions": 7, "dropout": 0.0}
    decoder = Decoder(**(values | settings)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
            if name.endswith("time_bias"):
                parameter.normal_()
    return decoder


def plain_rotated(vector: torch.Tensor, place: int) -> torch.Tensor:
    """A head's vector turned pair by pair, as complex numbers."""
    half = len(vector) // 2
    result = torch.empty_like(vector)
    for pair in range(half):
        angle = place / 10_000 ** (2 * pair / len(vector))
        turned = complex(float(vector[pair]), float(vector[pair + half])) * complex(math.cos(angle), math.sin(angle))
        result[pair], result[pair + half] = turned.real, turned.imag
    return result


def plain_attention(
    block: Block, x: torch.Tensor, lengths: list[int], times: torch.Tensor, asked: torch.Tensor, *, rotary: bool
) -> torch.Tensor:
    """The definition, token by token and head by head, of heads of width 4; `block` has 12 buckets of time."""
    expected = torch.zeros(len(x), 8)
    first = 0
    for length in lengths:
        q, k, v = block.attention_in(x[first : first + length]).detach().split(8, dim=-1)
        for head in range(2):
            part = slice(4 * head, 4 * head + 4)
            for place in range(length):
                scores = []
                for key in range(place + 1):
                    query_vector, key_vector = q[place, part], k[key, part]
                    if rotary:
                        query_vector, key_vector = plain_rotated(query_vector, place), plain_rotated(key_vector, key)
                    seconds = max(0, int(asked[first + place] - times[first + key])) // 1000
                    bucket = min(11, int(math.log2(1 + seconds)))
                    assert block.time_bias is not None
                    scores.append(query_vector @ key_vector / 2 + block.time_bias[bucket, head].detach())
                expected[first + place, part] = torch.stack(scores).softmax(0) @ v[: place + 1, part]
        first += length
    return block.attention_out(expected)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("tile_cells", [1 << 24, 1])
def test_attention_with_time_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch, rotary: bool, tile_cells: int
) -> None:
    monkeypatch.setattr(reference, "TILE_CELLS", {"cpu": tile_cells, "cuda": tile_cells})
    torch.manual_seed(1)
    block = Block(width=8, num_heads=2, mlp_ratio=2, dropout=0.0, time_bias=12)
    torch.nn.init.normal_(block.time_bias)  # type: ignore[arg-type]
    x, lengths = torch.randn(8, 8), [5, 3]
    layout = RowLayout.of_lengths(torch.tensor(lengths))
    elapsed = Elapsed(TIMES, ASKED, log2_boundaries(12, 1000, TIMES.device))
    rotation = rotation_of(layout.places, 4) if rotary else None
    found = attended(block, x, layout, rotation, elapsed)
    assert torch.allclose(found, plain_attention(block, x, lengths, TIMES, ASKED, rotary=rotary), atol=1e-5)


def test_tiles_change_neither_result_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, lengths = torch.randn(8, 8), torch.tensor([5, 3])
    results = []
    for cells in (1 << 24, 30, 1):
        monkeypatch.setattr(reference, "TILE_CELLS", {"cpu": cells, "cuda": cells})
        decoder = decoder_with(time_bias=12)
        hidden = decoder(x, lengths, TIMES, ASKED)
        hidden.square().sum().backward()
        gradients = [parameter.grad for parameter in decoder.parameters()]
        results.append(torch.cat([tensor.flatten() for tensor in (hidden.detach(), *gradients) if tensor is not None]))
    scale = results[0].abs().clamp_min(1)
    assert all(((result - results[0]).abs() / scale).max() < 1e-4 for result in results[1:])


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("time_bias", [0, 12])
def test_every_choice_is_causal_and_blind_to_company(positions: str, time_bias: int) -> None:
    decoder = decoder_with(positions=positions, time_bias=time_bias)
    lengths, x = [5, 0, 3], torch.randn(8, 8)
    with torch.no_grad():
        together = decoder(x, torch.tensor(lengths), TIMES, ASKED)
        alone = [
            decoder(x[rows], torch.tensor([len(x[rows])]), TIMES[rows], ASKED[rows]) for rows in (slice(5), slice(5, 8))
        ]
        assert torch.allclose(together, torch.cat(alone), atol=1e-5)
        changed, times, asked = x.clone(), TIMES.clone(), ASKED.clone()
        changed[3], times[3], asked[3] = torch.randn(8), 1, 77_000_000
        after = decoder(changed, torch.tensor(lengths), times, asked)
    unaffected = [0, 1, 2, 5, 6, 7]
    assert torch.allclose(together[unaffected], after[unaffected], atol=1e-5)
    assert ((together - after)[3:5].abs().amax(dim=1) > 1e-4).all()


def test_the_time_at_which_a_token_asks_matters_to_it_alone_and_defaults_to_its_own() -> None:
    decoder, x, lengths = decoder_with(time_bias=12, num_layers=1), torch.randn(8, 8), torch.tensor([5, 3])
    with torch.no_grad():
        own = decoder(x, lengths, TIMES)
        assert torch.equal(own, decoder(x, lengths, TIMES, TIMES))
        later = TIMES.clone()
        later[2] += 10_000_000
        differs = (own - decoder(x, lengths, TIMES, later)).abs().amax(dim=1) > 1e-5
    assert differs.tolist() == [False, False, True, False, False, False, False, False]


def test_time_that_runs_backwards_counts_as_none() -> None:
    decoder, x, lengths = decoder_with(time_bias=12), torch.randn(3, 8), torch.tensor([3])
    with torch.no_grad():
        backwards = decoder(x, lengths, torch.tensor([9_000_000, 5_000, -3_000_000]))
        assert torch.equal(backwards, decoder(x, lengths, torch.tensor([7, 7, 7])))


def test_rotary_attention_reads_distances_only() -> None:
    q, k = torch.randn(2, 1, 1, 6, dtype=torch.float64)
    products = [
        float((rotated(q, rotation_of(torch.tensor([a]), 6)) * rotated(k, rotation_of(torch.tensor([b]), 6))).sum())
        for a, b in ((3, 1), (12, 10), (902, 900))
    ]
    assert products == pytest.approx([products[0]] * 3, abs=1e-4)


def test_rotary_rows_may_be_longer_than_trained_and_learned_ones_may_not() -> None:
    x = torch.randn(40, 8)
    assert torch.isfinite(decoder_with(positions="rotary")(x, torch.tensor([40]))).all()
    with pytest.raises(DataError, match=r"a row has 40 tokens\nallowed: at most 7, the positions"):
        decoder_with()(x, torch.tensor([40]))


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="model.backbone.positions = 'sine'"):
        decoder_with(positions="sine")
    with pytest.raises(ConfigError, match="even width, not 3"):
        decoder_with(positions="rotary", width=6)
    with pytest.raises(DataError, match="no times"):
        decoder_with(time_bias=4)(torch.randn(2, 8), torch.tensor([2]))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_token_at_all_gives_no_vector(lengths: list[int]) -> None:
    decoder = decoder_with(time_bias=4)
    none = torch.tensor(lengths, dtype=torch.int64)
    assert decoder(torch.randn(0, 8), none, torch.zeros(0, dtype=torch.int64)).shape == (0, 8)


def test_defaults_have_the_parameters_they_always_had() -> None:
    names = {name for name, _ in decoder_with(num_layers=1).named_parameters()}
    assert len(names) == 15
    assert "positions.weight" in names
    assert not any("time_bias" in name for name in names)
    assert {name for name, _ in decoder_with(num_layers=1, positions="none").named_parameters()} == names - {
        "positions.weight"
    }
    fresh = Decoder(width=8, num_layers=1, num_heads=2, mlp_ratio=1, max_positions=3, dropout=0.0, time_bias=5)
    assert not dict(fresh.named_parameters())["blocks.0.time_bias"].any()


def test_sixteen_thousand_tokens_without_a_bias() -> None:
    decoder = decoder_with(scale=1.0, positions="rotary", num_layers=1)
    with torch.no_grad():
        hidden = decoder(torch.randn(16_000, 8), torch.tensor([16_000]))
    assert torch.isfinite(hidden).all()


@pytest.mark.parametrize("settings", [{}, {"positions": "rotary", "time_bias": 12}])
def test_half_precision_layers_stay_near_full_ones(settings: dict[str, object]) -> None:
    x, lengths = torch.randn(8, 8), torch.tensor([5, 3])
    decoder = decoder_with(scale=5.0, **settings)
    full = decoder(x, lengths, TIMES, ASKED).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = decoder(x, lengths, TIMES, ASKED)
    half.float().square().sum().backward()
    assert (half.detach() - full).abs().max() < 0.1
    assert all(torch.isfinite(parameter.grad).all() for parameter in decoder.parameters() if parameter.grad is not None)
