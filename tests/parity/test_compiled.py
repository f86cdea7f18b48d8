"""Compiled parts of models do what they do in plain PyTorch, for batches of any lengths."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import CONFIGS, VOCABULARY, histories_over_all_items

from tackboard.models.interface import compile_parts
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import HashedTables

pytestmark = [
    pytest.mark.slow,  # half a minute of compiling for each model
    pytest.mark.filterwarnings("ignore"),  # torch warns itself of what it does to compile
]


def tables_of(model: torch.nn.Module) -> list[HashedTables]:
    return [module for module in model.modules() if isinstance(module, HashedTables)]


@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_parts_give_the_same_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    plain = CONFIGS[name].build(VOCABULARY).train()
    compiled = copy.deepcopy(plain)
    compile_parts(compiled)
    parts = [module for module in compiled.modules() if getattr(module, "compiles", False)]
    # Two layers, and the sum of the loss where it is not an operation of ours.
    assert len(parts) == (2 if isinstance(CONFIGS[name], PinFMConfig) else 3)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for seed, num_rows in ((0, 32), (1, 40), (2, 33)):
        batch = histories_over_all_items(seed, num_rows)
        losses = []
        for model in (plain, compiled):
            torch.manual_seed(7)  # which pairs and which negatives are drawn
            model.zero_grad()
            for table in tables_of(model):
                table.pending.clear()
            loss = model.loss(batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (key, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), key
            if one.grad is not None and other.grad is not None:
                assert (one.grad - other.grad).abs().max() <= 1e-3 * (1e-3 + one.grad.abs().max()), key
        for first, second in zip(tables_of(plain), tables_of(compiled), strict=True):
            one, other = first.pending_gradient(), second.pending_gradient()
            assert (one - other).abs().max() <= 1e-3 * (1e-3 + one.abs().max())
