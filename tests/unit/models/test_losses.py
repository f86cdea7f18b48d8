"""InfoNCE: equal to a plain loop over predictions and occurrences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch, make_batch
from tackboard.features.column import Column
from tackboard.models.losses import next_item_loss, row_of_event, same_user_items


def plain_loss(
    hidden: torch.Tensor, items: torch.Tensor, batch: SequenceBatch, scale: float, *, logq: bool, mask: bool
) -> float:
    """The definition: one term per occurrence of a negative, divided by its expected count."""
    users = [int(user) for user, length in zip(batch.users, batch.lengths(), strict=True) for _ in range(int(length))]
    positives = [event for event in range(batch.num_events) if batch.is_positive[event]]
    own = {user: {int(batch.items[event]) for event in positives if users[event] == user} for user in users}
    total = 0.0
    for place, event in enumerate(positives):
        target = int(batch.items[event])
        logits = [scale * float(hidden[place] @ items[item]) for item in range(len(items))]
        denominator = math.exp(logits[target])
        for other in positives:
            negative = int(batch.items[other])
            if negative == target or (mask and negative in own[users[event]]):
                continue
            expected_count = len(positives) * math.exp(float(batch.item_log_q[negative])) if logq else 1.0
            denominator += math.exp(logits[negative]) / expected_count
        total += math.log(denominator) - logits[target]
    return total / len(positives)


@pytest.mark.parametrize("logq", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_equal_to_a_plain_loop(make_histories: Callable[..., SequenceBatch], logq: bool, mask: bool) -> None:
    """Rows 0 and 2 belong to one user, row 3 is empty, items repeat within and across rows."""
    batch = make_histories([6, 4, 5, 0, 3], users=[8, 3, 8, 9, 1])
    torch.manual_seed(0)
    hidden = torch.nn.functional.normalize(torch.randn(int(batch.is_positive.sum()), 6), dim=-1)
    items = torch.nn.functional.normalize(torch.randn(len(batch.item_ids), 6), dim=-1)
    loss = next_item_loss(hidden, items, batch, torch.tensor(4.0), correct_popularity=logq, mask_same_user=mask)
    assert float(loss) == pytest.approx(plain_loss(hidden, items, batch, 4.0, logq=logq, mask=mask), abs=1e-5)


def test_same_user_items_span_the_rows_of_a_user_and_hold_positives_only(make_history: Callable[..., Column]) -> None:
    batch = make_batch(
        history=make_history([2, 1, 1], [10, 11, 12, 13], [0] * 4, [0] * 4, [0] * 4),
        users=np.array([5, 6, 5]),
        is_positive=np.array([True, False, True, True]),
        hashing=HashConfig(),
    )
    assert same_user_items(batch).int().tolist() == [[1, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 1]]


def test_row_of_event_passes_over_empty_rows(make_histories: Callable[..., SequenceBatch]) -> None:
    assert row_of_event(make_histories([0, 2, 0, 1, 0])).tolist() == [1, 1, 3]


def test_a_user_without_negatives_has_loss_zero_and_a_finite_gradient(
    make_histories: Callable[..., SequenceBatch],
) -> None:
    batch = make_histories([6])
    hidden = torch.randn(int(batch.is_positive.sum()), 6, requires_grad=True)
    loss = next_item_loss(
        hidden,
        torch.randn(len(batch.item_ids), 6),
        batch,
        torch.tensor(1.0),
        correct_popularity=True,
        mask_same_user=True,
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
