"""InfoNCE: equal to a plain loop over pairs and occurrences, exact with the whole catalogue, unbiased with a part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core.errors import ConfigError
from tackboard.core.keyed_random import uniform
from tackboard.data.index import ItemFrequencies
from tackboard.data.negatives import UniformNegatives
from tackboard.features.column import Column
from tackboard.models.losses import (
    OwnLists,
    earlier_items,
    info_nce,
    negative_log_weights,
    next_item_loss,
    positive_counts,
    same_user_items,
)
from tackboard.models.targets import (
    Pairs,
    future_token_pairs,
    join_pairs,
    multi_token_pairs,
    next_token_pairs,
    row_of_event,
)

Histories = Callable[..., SequenceBatch]
HASHING = HashConfig(num_hashes=3, num_rows=32)
CATALOGUE = np.arange(-3, 27, dtype=np.int64)
"""The twelve items of `make_histories`, and as many again that no event has."""
LENGTHS, USERS = [6, 4, 5, 0, 3], [8, 3, 8, 9, 1]
"""Rows 0 and 2 belong to one user, row 3 is empty, items repeat within and across rows."""


def with_uniform(batch: SequenceBatch, count: int, *key: int) -> SequenceBatch:
    frequencies = ItemFrequencies.of(batch.item_ids[batch.items].numpy())
    return UniformNegatives(CATALOGUE, count, HASHING, frequencies, seed=5).add(batch, *(key or (0,)))


def own_of(own: OwnLists, row: int) -> list[int]:
    """The list of a row's own items."""
    group = own.groups[row]
    return own.items[own.offsets[group] : own.offsets[group + 1]].tolist()


def unit(*shape: int) -> torch.Tensor:
    return functional.normalize(torch.randn(*shape), dim=-1)


def plain_losses(
    hidden: torch.Tensor,
    items: torch.Tensor,
    batch: SequenceBatch,
    pairs: Pairs,
    *,
    in_batch: bool,
    logq: bool,
    mask: bool,
    later: bool = False,
) -> list[float]:
    """The definition: one term per occurrence of a negative, divided by its expected count."""
    rows = row_of_event(batch).tolist()
    users = [int(batch.users[row]) for row in rows]
    positives = [event for event in range(batch.num_events) if batch.is_positive[event]]
    own = {user: {int(batch.items[event]) for event in positives if users[event] == user} for user in users}
    occurrences = [int(batch.items[event]) for event in positives] if in_batch else []
    occurrences += batch.sampled.tolist()
    before = {
        row + event: {int(batch.items[one]) for one in positives if one < event and rows[one] == row}
        for row in range(batch.num_rows)
        for event in range(int(batch.offsets[row]), int(batch.offsets[row + 1]) + 1)
    }
    found = []
    for token, target, row in zip(pairs.tokens.tolist(), pairs.items.tolist(), pairs.rows.tolist(), strict=True):
        logits = [float(hidden[token] @ items[item]) for item in range(len(items))]
        denominator = math.exp(logits[target])
        for negative in occurrences:
            masked = before[token] if later else own[int(batch.users[row])]
            if negative == target or (mask and negative in masked):
                continue
            expected = float(batch.sample_rate)
            expected += len(positives) * math.exp(float(batch.item_log_q[negative])) if in_batch else 0.0
            denominator += math.exp(logits[negative]) / (expected if logq else 1.0)
        found.append(math.log(denominator) - logits[target])
    return found


def all_pairs(batch: SequenceBatch) -> Pairs:
    """Tokens with one target, with several, and with none."""
    return join_pairs([next_token_pairs(batch), multi_token_pairs(batch, 3), future_token_pairs(batch, 2, 2)])


@pytest.mark.parametrize("logq", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(("in_batch", "count"), [(True, 0), (False, 9), (True, 9), (False, 1000), (True, 1000)])
def test_every_pair_equals_a_plain_loop(
    make_histories: Histories, in_batch: bool, count: int, logq: bool, mask: bool
) -> None:
    batch = make_histories(LENGTHS, users=USERS)
    batch = with_uniform(batch, count) if count else batch
    pairs = all_pairs(batch)
    torch.manual_seed(0)
    hidden = 4.0 * unit(batch.num_events + batch.num_rows, 6)
    items = unit(len(batch.item_ids), 6)
    _, found = info_nce(
        hidden,
        items,
        pairs,
        torch.ones(len(pairs)),
        negative_log_weights(batch, in_batch=in_batch, correct_popularity=logq),
        same_user_items(batch) if mask else None,
    )
    expected = plain_losses(hidden, items, batch, pairs, in_batch=in_batch, logq=logq, mask=mask)
    assert len(expected) > 25
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("in_batch", "count"), [(True, 0), (False, 1000), (True, 9)])
def test_later_positives_of_the_same_user_may_stay_negatives(
    make_histories: Histories, in_batch: bool, count: int
) -> None:
    batch = make_histories(LENGTHS, users=USERS)
    batch = with_uniform(batch, count) if count else batch
    pairs = all_pairs(batch)
    torch.manual_seed(0)
    hidden, items = 4.0 * unit(batch.num_events + batch.num_rows, 6), unit(len(batch.item_ids), 6)
    # Row r has a token more than events, and there are as many behind the tokens of the rows before it.
    seen = torch.cat([torch.arange(length + 1) for length in LENGTHS])
    weights = negative_log_weights(batch, in_batch=in_batch)
    _, found = info_nce(hidden, items, pairs, torch.ones(len(pairs)), weights, earlier_items(batch), seen)
    expected = plain_losses(hidden, items, batch, pairs, in_batch=in_batch, logq=True, mask=True, later=True)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    everything = plain_losses(hidden, items, batch, pairs, in_batch=in_batch, logq=True, mask=True)
    assert sum(1 for one, other in zip(expected, everything, strict=True) if one > other + 1e-4) > 5


def test_the_mean_over_positive_events(make_histories: Histories) -> None:
    batch = make_histories(LENGTHS, users=USERS)
    torch.manual_seed(0)
    hidden, items = unit(int(batch.is_positive.sum()), 6), unit(len(batch.item_ids), 6)
    pairs = next_token_pairs(batch)
    pairs = Pairs(torch.arange(len(pairs)), pairs.items, pairs.rows)
    for logq, mask in ((True, True), (False, False)):
        loss = next_item_loss(hidden, items, batch, torch.tensor(4.0), correct_popularity=logq, mask_same_user=mask)
        expected = plain_losses(4.0 * hidden, items, batch, pairs, in_batch=True, logq=logq, mask=mask)
        assert float(loss) == pytest.approx(float(np.mean(expected)), abs=1e-5)


def test_the_whole_catalogue_alone_is_the_exact_softmax(make_histories: Histories) -> None:
    """Every weight is 1, and the loss that of torch's own cross-entropy."""
    batch = with_uniform(make_histories(LENGTHS, users=USERS), len(CATALOGUE))
    assert batch.item_ids.tolist() == CATALOGUE.tolist()
    weights = negative_log_weights(batch, in_batch=False)
    assert weights.tolist() == [0.0] * len(CATALOGUE)
    torch.manual_seed(0)
    hidden, items = 4.0 * unit(batch.num_events + batch.num_rows, 6), unit(len(CATALOGUE), 6)
    pairs = all_pairs(batch)
    _, found = info_nce(hidden, items, pairs, torch.ones(len(pairs)), weights, None)
    expected = functional.cross_entropy(hidden[pairs.tokens] @ items.T, pairs.items, reduction="none")
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("mask", [True, False])
def test_the_gradient_is_that_of_the_definition(make_histories: Histories, mask: bool) -> None:
    batch = with_uniform(make_histories([4, 3], users=[1, 2]), 5)
    pairs, own = all_pairs(batch), same_user_items(batch) if mask else None
    weights = negative_log_weights(batch).double()
    torch.manual_seed(0)
    hidden = torch.randn(batch.num_events + batch.num_rows, 4, dtype=torch.float64)
    items = torch.randn(len(batch.item_ids), 4, dtype=torch.float64)

    def definition(hidden: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        total = hidden.new_zeros(())
        for token, target, row in zip(pairs.tokens, pairs.items, pairs.rows, strict=True):
            left_out = torch.zeros(len(items), dtype=torch.bool)
            left_out[own_of(own, int(row)) if own is not None else []] = True
            left_out[target] = True
            logits = items @ hidden[token]
            negatives = (logits + weights)[~left_out]
            total = total + torch.logsumexp(torch.cat([logits[target][None], negatives]), 0) - logits[target]
        return total

    expected = torch.autograd.functional.jacobian(definition, (hidden, items))
    leaves = [tensor.float().requires_grad_() for tensor in (hidden, items)]
    info_nce(leaves[0], leaves[1], pairs, torch.ones(len(pairs)), weights.float(), own)[0].backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad.double(), gradient, atol=1e-5)


@pytest.mark.parametrize(("in_batch", "count"), [(True, 0), (False, 6), (True, 6)])
def test_the_corrected_sum_is_on_average_the_sum_over_the_catalogue(
    make_history: Callable[..., Column], in_batch: bool, count: int
) -> None:
    """Each item's weight is 1 in expectation, so is the estimate of any sum over the catalogue unbiased."""
    num_items, num_draws, num_events = 10, 800, 12
    frequencies = ItemFrequencies(np.arange(num_items), np.arange(1, num_items + 1) ** 2)
    share = np.arange(1, num_items + 1) ** 2 / (np.arange(1, num_items + 1) ** 2).sum()
    negatives = UniformNegatives(np.arange(num_items), max(1, count), HASHING, frequencies, seed=3)
    weights = np.zeros((num_draws, num_items))
    scores = 2.0 * uniform(8, np.arange(num_items))
    for draw in range(num_draws):
        items = np.searchsorted(np.cumsum(share), uniform(7, draw, np.arange(num_events)))
        none = [0] * num_events
        batch = make_batch(
            history=make_history([num_events], items, none, none, none),
            is_positive=np.ones(num_events, dtype=np.bool_),
            hashing=HASHING,
            log_q=frequencies.log_share,
        )
        batch = negatives.add(batch, draw) if count else batch
        weights[draw, batch.item_ids.numpy()] = negative_log_weights(batch, in_batch=in_batch).exp().numpy()
    spread = weights.std(axis=0) / math.sqrt(num_draws)
    assert (np.abs(weights.mean(axis=0) - 1.0) < 4 * spread + 1e-9).all()
    sums = weights @ np.exp(scores)
    assert sums.mean() == pytest.approx(np.exp(scores).sum(), abs=4 * sums.std() / math.sqrt(num_draws))
    plain = (weights > 0) @ np.exp(scores)  # what no correction would make of it
    assert abs(plain.mean() - np.exp(scores).sum()) > 10 * plain.std() / math.sqrt(num_draws)


def test_expected_counts_may_come_from_elsewhere(make_histories: Histories) -> None:
    batch = with_uniform(make_histories(LENGTHS), 9)
    expected = torch.linspace(0.1, 3.0, len(batch.item_ids))
    found = negative_log_weights(batch, log_expected_M=expected.log()).exp()
    counts = positive_counts(batch) + torch.isin(torch.arange(len(expected)), batch.sampled).long()
    assert torch.allclose(found, counts / (expected + batch.sample_rate), atol=1e-6)
    alone = negative_log_weights(batch, in_batch=False, log_expected_M=expected.log()).exp()
    assert alone[batch.sampled].tolist() == pytest.approx([1 / float(batch.sample_rate)] * len(batch.sampled))


def test_a_loss_without_negatives_says_which_settings_give_some(make_histories: Histories) -> None:
    with pytest.raises(ConfigError, match="no negatives") as caught:
        negative_log_weights(make_histories([3]), in_batch=False)
    assert "data.uniform_negatives" in caught.value.fix


def test_same_user_items_span_the_rows_of_a_user_and_hold_positives_only(make_history: Callable[..., Column]) -> None:
    batch = make_batch(
        history=make_history([2, 1, 1], [10, 11, 12, 13], [0] * 4, [0] * 4, [0] * 4),
        users=np.array([5, 6, 5]),
        is_positive=np.array([True, False, True, True]),
        hashing=HashConfig(),
    )
    own = same_user_items(batch)
    assert [own_of(own, row) for row in range(3)] == [[0, 3], [2], [0, 3]]
    assert positive_counts(batch).tolist() == [1, 0, 1, 1]


def test_a_user_without_negatives_has_loss_zero_and_a_finite_gradient(make_histories: Histories) -> None:
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


@pytest.mark.parametrize("mask", [True, False])
def test_no_pair_is_no_loss(make_histories: Histories, mask: bool) -> None:
    batch = make_histories([3, 2])
    batch = dataclasses.replace(batch, is_positive=torch.zeros_like(batch.is_positive))
    own = same_user_items(batch) if mask else None
    hidden = torch.zeros(0, 6)
    items, pairs = unit(len(batch.item_ids), 6), next_token_pairs(batch)
    total, found = info_nce(hidden, items, pairs, torch.zeros(0), torch.zeros(len(items)), own)
    assert found.shape == (0,)
    assert float(total) == 0.0
