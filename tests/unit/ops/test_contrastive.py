"""The contrastive loss in blocks equals the definition, whatever the size of blocks; wrong shapes are refused."""

from __future__ import annotations

import pytest
import torch
from contrastive_problems import MODES, SIZES, make_problem, outcome, require_equal

from tackboard.core.errors import DataError
from tackboard.ops import contrastive, contrastive_blocked, contrastive_reference
from tackboard.ops.contrastive import contrastive_loss


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


@torch.no_grad()
def test_the_definition() -> None:
    """A loop over pairs and items, with a sum of plain exponentials."""
    hidden, items, log_weights, pairs, own = make_problem((21, 30, 8), "own items before", is_left_out=False)
    assert own is not None and own.places is not None and own.seen is not None
    _, losses = contrastive_reference.contrastive_loss(hidden, items, log_weights, pairs, own)
    for pair, (row, right) in enumerate(zip(pairs.sums.tolist(), pairs.items.tolist(), strict=True)):
        group = int(own.of_sum[row])
        entries = range(int(own.offsets[group]), int(own.offsets[group + 1]))
        taken_out = {int(own.items[entry]) for entry in entries if own.places[entry] < own.seen[row]}
        scores = (hidden[row] @ items.T).exp() * log_weights.exp()
        total = sum(float(scores[item]) for item in range(len(items)) if item not in taken_out)
        expected = torch.log1p(torch.tensor(total) / (hidden[row] @ items[right]).exp())
        assert float(losses[pair]) == pytest.approx(float(expected), abs=1e-5)


def test_results_repeat_bit_for_bit_and_do_not_need_gradients() -> None:
    problem = make_problem((300, 130, 64), "own items", is_left_out=False)
    first, second = outcome(contrastive_loss, problem), outcome(contrastive_loss, problem)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with torch.no_grad():
        total, losses = contrastive_loss(*problem)
    assert not total.requires_grad
    assert torch.equal(losses.double(), first[1])


def test_half_precision_products_stay_close() -> None:
    problem = make_problem((133, 77, 24), "own items", is_left_out=False)
    exact = outcome(contrastive_loss, problem)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outcome(contrastive_loss, problem)
    for found, expected in zip(rounded, exact, strict=True):
        assert 0 < (found - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_no_negatives_give_no_loss_and_no_gradient() -> None:
    hidden, items, log_weights, pairs, _ = make_problem((4, 3, 8), "no own items", is_left_out=True)
    total, losses = contrastive_loss(hidden, items, torch.full_like(log_weights, -torch.inf), pairs)
    assert losses.tolist() == [0.0] * 4
    gradients = torch.autograd.grad(total, [hidden, items])
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


def test_blocks_have_as_many_sums_as_fit() -> None:
    assert contrastive_blocked.sums_per_block(4096, "cpu") == 1024
    assert contrastive_blocked.sums_per_block(1 << 16, "cpu") == contrastive_blocked.LEAST_SUMS
    assert contrastive_blocked.sums_per_block(1 << 30, "cpu") == 1


def test_wrong_shapes_are_refused() -> None:
    hidden, items, log_weights, pairs, own = make_problem((4, 3, 8), "own items", is_left_out=True)
    with pytest.raises(DataError, match="hidden vectors have shape"):
        contrastive_loss(hidden[:, :5], items, log_weights, pairs, own)
    with pytest.raises(DataError, match="4 pairs and 3 sums"):
        contrastive_loss(hidden[:3], items, log_weights, pairs, own)
    assert contrastive.choose(hidden) is contrastive_blocked.contrastive_loss
