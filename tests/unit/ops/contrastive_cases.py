"""The kernels of the contrastive loss equal the definition; run by `test_contrastive_triton.py`."""

from __future__ import annotations

import pytest
import torch
from contrastive_problems import MODES, SIZES, make_problem, outcome

from tackboard.ops import contrastive_reference, contrastive_triton
from tackboard.ops.contrastive import contrastive_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_left_out", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", SIZES)
def test_equal_to_the_definition(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    mode: str,
    is_left_out: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        return  # the interpreter cannot compute products of bf16
    monkeypatch.setattr(contrastive_triton, "BLOCK", 64)  # so that a program reads several blocks
    problem = make_problem(sizes, mode, is_left_out=is_left_out, dtype=dtype, device=device)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    exact = tuple(t.detach().float().requires_grad_() for t in problem[:2])
    fast = outcome(contrastive_triton.contrastive_loss, problem)
    slow = outcome(contrastive_reference.contrastive_loss, (*exact, *problem[2:]))
    # With one item, the parts of a gradient cancel, and the rounding of the parts remains.
    least = 1.0 if sizes[1] == 1 else 1e-2
    for found, expected in zip(fast, slow, strict=True):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(least)


def test_no_sums_and_no_negatives(device: str) -> None:
    problem = make_problem((0, 5, 8), "no own items", is_left_out=True, device=device)
    total, losses = contrastive_loss(*problem, implementation=contrastive_triton.contrastive_loss)
    assert float(total.detach()) == 0.0
    assert len(losses) == 0
    assert float(torch.autograd.grad(total, problem[1])[0].abs().max()) == 0.0
    hidden, items, log_weights, pairs, *_ = make_problem((4, 3, 8), "no own items", is_left_out=True, device=device)
    log_weights.fill_(-1e4)
    total, losses = contrastive_loss(
        hidden, items, log_weights, pairs, implementation=contrastive_triton.contrastive_loss
    )
    assert float(total.detach()) == 0.0
    assert losses.tolist() == [0.0] * 4
