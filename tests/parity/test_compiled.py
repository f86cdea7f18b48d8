"""Compiled parts of models do what they do in plain PyTorch, for batches of any lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import histories_over_all_items

from tackboard.batch import HashConfig
from tackboard.events.vocabulary import Vocabulary
from tackboard.models.interface import compile_parts
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import hstu, sasrec

pytestmark = [
    pytest.mark.slow,  # half a minute of compiling for each model
    pytest.mark.filterwarnings("ignore"),  # torch warns itself of what it does to compile
]

VOCABULARY = Vocabulary.from_names(["click", "hide"], ["home"])
SHARED: dict[str, Any] = {
    "hashing": HashConfig(num_hashes=1, num_rows=200, method="modulo"),
    "width": 16,
    "num_layers": 2,
    "max_history": 20,
    "in_batch_negatives": False,
}
INPUTS: dict[str, Any] = {"use_actions": True, "use_time_gap": True, "use_request_time": True, "max_history": 20}
CONFIGS: dict[str, Any] = {
    "gpt": PinFMConfig(**SHARED, positions="rotary", request_time=True),
    "gpt, two losses": PinFMConfig(**SHARED, later_negatives=True, multi_token_weight=0.5),
    "hstu": PinFMConfig(**SHARED, backbone="hstu", positions="none", later_negatives=True),
    "sasrec, sampled": sasrec(200, **INPUTS, loss="sampled", num_negatives=8, dropout=0.0),
    "hstu, full": hstu(200, **INPUTS, loss="full", dropout=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_parts_give_the_same_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    plain = CONFIGS[name].build(VOCABULARY).train()
    compiled = copy.deepcopy(plain)
    compile_parts(compiled)
    parts = [module for module in compiled.modules() if getattr(module, "compiles", False)]
    assert len(parts) == 3  # two layers, and the sum of the loss
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for seed, num_rows in ((0, 32), (1, 40), (2, 33)):
        batch = histories_over_all_items(seed, num_rows)
        losses = []
        for model in (plain, compiled):
            torch.manual_seed(7)  # which pairs and which negatives are drawn
            model.zero_grad()
            loss = model.loss(batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (key, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), key
            if one.grad is not None and other.grad is not None:
                gap = (one.grad.to_dense() - other.grad.to_dense()).abs().max()
                assert gap <= 1e-3 * (1e-3 + one.grad.to_dense().abs().max()), key
