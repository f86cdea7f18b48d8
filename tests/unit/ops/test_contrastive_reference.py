"""The definition of the contrastive loss equals a loop over pairs and items."""

from __future__ import annotations

import pytest
import torch
from contrastive_problems import make_problem

from tackboard.ops import contrastive_reference
from tackboard.ops.contrastive import contrastive_loss


@torch.no_grad()
def test_the_definition() -> None:
    """A loop over pairs and items, with a sum of plain exponentials."""
    hidden, items, log_weights, pairs, own, _ = make_problem((21, 30, 8), "own items before", is_left_out=False)
    assert own is not None and own.places is not None and own.seen is not None
    _, losses = contrastive_loss(
        hidden, items, log_weights, pairs, own, implementation=contrastive_reference.contrastive_loss
    )
    for pair, (row, right) in enumerate(zip(pairs.sums.tolist(), pairs.items.tolist(), strict=True)):
        group = int(own.of_sum[row])
        entries = range(int(own.offsets[group]), int(own.offsets[group + 1]))
        taken_out = {int(own.items[entry]) for entry in entries if own.places[entry] < own.seen[row]}
        scores = (hidden[row] @ items.T).exp() * log_weights.exp()
        total = sum(float(scores[item]) for item in range(len(items)) if item not in taken_out)
        expected = torch.log1p(torch.tensor(total) / (hidden[row] @ items[right]).exp())
        assert float(losses[pair]) == pytest.approx(float(expected), abs=1e-5)
