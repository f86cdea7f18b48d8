"""Every line of the ladder is switched on and off as its words say."""

from __future__ import annotations

import pytest
import torch

from tackboard.batch.row_layout import RowLayout
from tackboard.bench.dcat.data import DcatPreset
from tackboard.bench.dcat.rungs import DCAT, FIXED, RUNGS, SKIP, WHOLE, hiding
from tackboard.models import decoder
from tackboard.models.backbone import BackboneConfig

BY_NAME = {rung.name: rung for rung in RUNGS}


def test_settings_of_the_lines(smallest: DcatPreset) -> None:
    fusions = {name: rung.config(smallest.config()).model.fusion for name, rung in BY_NAME.items()}
    assert list(fusions) == [WHOLE, DCAT, SKIP, FIXED]
    assert [fusion.dcat for fusion in fusions.values()] == [False, True, True, True]
    assert [fusion.fixed_length for fusion in fusions.values()] == [0, 0, 0, smallest.max_history]


def test_only_one_line_computes_the_last_layer_of_the_context() -> None:
    stack = BackboneConfig(num_layers=2).build(width=8, max_positions=8, dropout=0.0)
    layout = RowLayout.of_lengths(torch.tensor([3, 2]))
    has_hidden = {}
    for name in (DCAT, SKIP):
        with BY_NAME[name].active():
            has_hidden[name] = stack.read_context(torch.randn(5, 8), layout, needs_hidden=False).hidden_TD is not None
    assert has_hidden == {DCAT: True, SKIP: False}
    assert stack.read_context(torch.randn(5, 8), layout, needs_hidden=False).hidden_TD is None, "it is switched off"


@pytest.mark.parametrize("slots", [1, 3, 9])
def test_hiding_changes_only_last_tokens_whose_row_is_too_long(slots: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    layout = RowLayout.of_lengths(torch.tensor([5, 4]))
    plain = decoder.packed_attention(q, k, v, layout)
    with hiding(slots):
        found = decoder.packed_attention(q, k, v, layout)
    kept = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(found[kept], plain[kept])
    for last, length in ((4, 5), (8, 4)):
        newest = slice(last + 1 - min(slots, length), last + 1)
        weights = (torch.einsum("hd,shd->hs", q[last], k[newest]) / 2.0).softmax(dim=1)
        torch.testing.assert_close(found[last], torch.einsum("hs,shd->hd", weights, v[newest]))
    assert torch.allclose(found[[4, 8]], plain[[4, 8]], atol=1e-6) == (slots == 9)
