"""SASRec's layers: equal to their definition written out, causal, blind to company."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tackboard.batch.row_layout import RowLayout
from tackboard.core.errors import DataError
from tackboard.models.sasrec import SASRec, SASRecLayer


def test_a_sasrec_layer_equals_its_definition() -> None:
    torch.manual_seed(1)
    layer = SASRecLayer(width=6, num_heads=2, ffn_width=4, dropout=0.5).eval()
    x, expected = torch.randn(8, 6), []
    for first, end in ((0, 5), (5, 8)):
        for place in range(first, end):
            normed = layer.query_norm(x[place])
            keys, values = layer.key_value(x[first : place + 1]).split(6, dim=1)
            heads = []
            for part in (slice(0, 3), slice(3, 6)):
                weights = (keys[:, part] @ layer.query(normed)[part] / 3**0.5).softmax(0)
                heads.append(weights @ values[:, part])
            y = layer.ffn_norm(normed + layer.attention_out(torch.cat(heads)))
            expected.append(y + layer.ffn_out(functional.relu(layer.ffn_in(y))))
    found = layer(x, RowLayout.of_lengths(torch.tensor([5, 3])))
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)


def sasrec_with(**settings: object) -> SASRec:
    torch.manual_seed(0)
    values = {"width": 6, "num_layers": 2, "num_heads": 2, "ffn_width": 5, "max_positions": 5, "dropout": 0.0}
    return SASRec(**(values | settings)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_a_token_sees_its_row_up_to_itself_and_nothing_else(positions: str, final_norm: bool) -> None:
    model, x = sasrec_with(positions=positions, final_norm=final_norm), torch.randn(7, 6)
    lengths = torch.tensor([4, 0, 3])
    with torch.no_grad():
        before = model(x, lengths)
        changed = x.clone()
        changed[2] += 1
        after = model(changed, lengths)
        alone = model(x[4:], lengths[2:])
    assert ((before - after).abs().amax(dim=1) > 1e-5).tolist() == [False, False, True, True, False, False, False]
    assert torch.allclose(before[4:], alone, atol=1e-6)


def test_learned_positions_tell_places_apart_and_end() -> None:
    same = torch.ones(3, 6)
    with torch.no_grad():
        told = sasrec_with()(same, torch.tensor([3]))
        blind = sasrec_with(positions="none")(same, torch.tensor([3]))
    assert (told[0] - told[1]).abs().max() > 1e-3
    assert torch.allclose(blind[0], blind[1], atol=1e-6)
    with pytest.raises(DataError, match="a row has 6 tokens"):
        sasrec_with()(torch.ones(6, 6), torch.tensor([6]))
