"""The contrastive loss in blocks equals the definition, whatever the size of blocks."""

from __future__ import annotations

import math

import pytest
import torch
from contrastive_problems import MODES, SIZES, make_problem, outcome, require_equal

from tackboard.ops import contrastive_blocked, contrastive_reference
from tackboard.ops.contrastive import ContrastivePairs, contrastive_loss


@pytest.mark.parametrize("is_left_out", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cells", [1, 333, 1 << 22])
def test_blocks_equal_the_definition(
    monkeypatch: pytest.MonkeyPatch, cells: int, sizes: tuple[int, int, int], mode: str, is_left_out: bool
) -> None:
    monkeypatch.setattr(contrastive_blocked, "BLOCK_CELLS", {"cpu": cells})
    monkeypatch.setattr(contrastive_blocked, "LEAST_SUMS", 1)
    problem = make_problem(sizes, mode, is_left_out=is_left_out)
    require_equal(contrastive_blocked.contrastive_loss, contrastive_reference.contrastive_loss, problem, 1e-5)


def test_half_precision_products_stay_close() -> None:
    problem = make_problem((133, 77, 24), "own items", is_left_out=False)
    exact = outcome(None, problem)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outcome(None, problem)
    for found, expected in zip(rounded, exact, strict=True):
        assert 0 < (found - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_blocks_have_as_many_sums_as_fit() -> None:
    assert contrastive_blocked.sums_per_block(4096, "cpu") == 1024
    assert contrastive_blocked.sums_per_block(1 << 16, "cpu") == contrastive_blocked.LEAST_SUMS
    assert contrastive_blocked.sums_per_block(1 << 30, "cpu") == 1


@pytest.mark.parametrize("gap", [20.0, 87.0, 150.0])
def test_a_high_score_of_an_item_without_weight_changes_nothing(gap: float) -> None:
    """The highest score is subtracted before exponentials are taken. With it, all others may be too small for fp32."""
    axes = torch.eye(4)
    items = torch.stack([axes[0], axes[1], axes[2], -0.2 * axes[0]])
    log_weights = torch.tensor([-math.inf, 0.0, 0.5, -math.inf])
    pairs = ContrastivePairs(torch.tensor([0]), torch.tensor([3]), torch.ones(1), is_left_out=True)
    found = []
    for implementation in (contrastive_blocked.contrastive_loss, contrastive_reference.contrastive_loss):
        vectors = [(gap * axes[:1]).requires_grad_(), items.clone().requires_grad_()]
        total, _ = contrastive_loss(*vectors, log_weights, pairs, implementation=implementation)
        found.append([total, *torch.autograd.grad(total, vectors)])
    torch.testing.assert_close(*found)
