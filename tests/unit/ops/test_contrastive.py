"""The contrastive loss repeats bit for bit, works without gradients and negatives, and refuses wrong shapes."""

from __future__ import annotations

import pytest
import torch
from contrastive_problems import make_problem, outcome

from tackboard.core.errors import DataError
from tackboard.ops import contrastive, contrastive_blocked
from tackboard.ops.contrastive import contrastive_loss


def test_results_repeat_bit_for_bit_and_do_not_need_gradients() -> None:
    problem = make_problem((300, 130, 64), "own items, listed", is_left_out=False)
    first, second = outcome(None, problem), outcome(None, problem)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with torch.no_grad():
        total, losses = contrastive_loss(*problem)
    assert not total.requires_grad
    assert torch.equal(losses.double(), first[1])


def test_no_negatives_give_no_loss_and_no_gradient() -> None:
    hidden, items, log_weights, pairs, *_ = make_problem((4, 3, 8), "no own items", is_left_out=True)
    total, losses = contrastive_loss(hidden, items, torch.full_like(log_weights, -torch.inf), pairs)
    assert losses.tolist() == [0.0] * 4
    gradients = torch.autograd.grad(total, [hidden, items])
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


def test_wrong_shapes_are_refused() -> None:
    hidden, items, log_weights, pairs, own, _ = make_problem((4, 3, 8), "own items", is_left_out=True)
    with pytest.raises(DataError, match="hidden vectors have shape"):
        contrastive_loss(hidden[:, :5], items, log_weights, pairs, own)
    with pytest.raises(DataError, match="4 pairs and 3 sums"):
        contrastive_loss(hidden[:3], items, log_weights, pairs, own)
    assert contrastive.choose(hidden) is contrastive_blocked.contrastive_loss


def test_an_item_that_is_listed_twice_counts_once() -> None:
    problem = make_problem((21, 30, 8), "own items, listed", is_left_out=False)
    negatives = problem[5]
    assert negatives is not None
    once = (*problem[:5], torch.unique(negatives))
    for found, expected in zip(outcome(None, problem), outcome(None, once), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_listed_negatives_are_those_whose_weight_is_not_zero() -> None:
    hidden, items, log_weights, pairs, own, negatives = make_problem((21, 30, 8), "own items, listed", is_left_out=True)
    assert negatives is not None
    others = torch.ones(30, dtype=torch.bool).index_fill(0, negatives, False)
    whole = (hidden, items, log_weights.masked_fill(others, -torch.inf), pairs, own, None)
    for found, expected in zip(
        outcome(None, (hidden, items, log_weights, pairs, own, negatives)), outcome(None, whole), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-6)
