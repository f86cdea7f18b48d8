"""Vectors from the co-engagement graph: counted pair by pair, and beside a dense PPMI with an exact decomposition."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tackboard.core.keyed_random import uniform
from tackboard.data import co_engagement
from tackboard.data.co_engagement import PairCounts, ppmi, vectors_of

NUM_ITEMS, WINDOW = 60, 3


def events(num_users: int = 40, length: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Users who stay within one of three groups of items; item 59 never occurs, item 58 only once and alone."""
    users = np.repeat(np.arange(num_users), length)
    draws = uniform(3, users, np.arange(len(users)))
    items = (users % 3) * 19 + (draws**2 * 19).astype(np.int64)
    return np.append(users, num_users), np.append(items, 58)


def counted(max_pairs: int = 10_000) -> PairCounts:
    users, items = events()
    pairs = PairCounts(NUM_ITEMS, window=WINDOW, max_pairs=max_pairs, seed=0)
    for first, last in ((0, 300), (300, 301), (301, 900), (900, len(users))):
        # No user is split between calls: cuts move to the next user.
        bounds = [int(np.searchsorted(users, users[cut])) if cut < len(users) else cut for cut in (first, last)]
        pairs.add(users[slice(*bounds)], items[slice(*bounds)])
    return pairs


def plainly() -> Counter[tuple[int, int]]:
    users, items = events()
    found: Counter[tuple[int, int]] = Counter()
    for place in range(len(users)):
        for later in range(place + 1, min(place + WINDOW + 1, len(users))):
            if users[place] == users[later] and items[place] != items[later]:
                found[tuple(sorted((int(items[place]), int(items[later]))))] += 1  # type: ignore[index]
    return found


@pytest.mark.parametrize("at_once", [1, 500, 1 << 23])
def test_pairs_are_counted_as_in_a_plain_loop(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(co_engagement, "PAIRS_AT_ONCE", at_once)
    pairs = counted()
    first, second, counts = pairs.result()
    assert dict(zip(zip(first.tolist(), second.tolist(), strict=True), counts.tolist(), strict=True)) == plainly()
    assert pairs.num_dropped == 0 and pairs.sums[58] == pairs.sums[59] == 0


def test_too_many_pairs_drop_the_rarest() -> None:
    whole, kept = counted(), counted(max_pairs=100)
    counts, left = whole.result()[2], kept.result()[2]
    assert len(left) == 100 and kept.num_dropped == len(counts) - 100
    assert sorted(left) == sorted(counts)[-100:], "what stays is the most frequent"
    assert np.array_equal(whole.sums, kept.sums)
    assert [each.tolist() for each in kept.result()] == [each.tolist() for each in counted(max_pairs=100).result()]


@pytest.mark.parametrize(("width", "iterations"), [(3, co_engagement.ITERATIONS), (8, 200)])
def test_vectors_equal_a_dense_decomposition(monkeypatch: pytest.MonkeyPatch, width: int, iterations: int) -> None:
    # The first three singular values stand apart. The others are close together and need more iterations to part.
    monkeypatch.setattr(co_engagement, "ITERATIONS", iterations)
    dense = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for (first, second), count in plainly().items():
        dense[first, second] = dense[second, first] = count
    sums = dense.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.nan_to_num(np.maximum(np.log(dense * dense.sum() / np.outer(sums, sums)), 0.0), nan=0.0)
    left, values, _ = np.linalg.svd(weights)
    exact = left[:, :width] * np.sqrt(values[:width])
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    exact = np.divide(exact, norms, out=np.zeros_like(exact), where=weights.any(axis=1)[:, None])
    found, own = vectors_of(ppmi(counted()), np.arange(NUM_ITEMS), width, seed=1)
    assert own.tolist() == weights.any(axis=1).tolist() and not own[58:].any() and not found[58:].any()
    assert np.allclose(found @ found.T, exact @ exact.T, atol=2e-3), "equal up to the signs of the columns"
    assert np.allclose(np.linalg.norm(found[own], axis=1), 1.0, atol=1e-5)
    group = np.arange(57) // 19
    likeness = found[:57] @ found[:57].T
    same = group[:, None] == group
    assert likeness[same].mean() > likeness[~same].mean() + 0.3


def test_the_same_seed_gives_the_same_bits() -> None:
    edges, ids = ppmi(counted()), np.arange(NUM_ITEMS) * 7
    vectors = [vectors_of(edges, ids, 3, seed)[0] for seed in (1, 1, 2)]
    assert vectors[0].tobytes() == vectors[1].tobytes() != vectors[2].tobytes()
    assert np.allclose(vectors[0] @ vectors[0].T, vectors[2] @ vectors[2].T, atol=2e-3), "another start ends there too"


def test_few_items_leave_columns_empty() -> None:
    pairs = PairCounts(4, window=1, max_pairs=10, seed=0)
    vectors, own = vectors_of(ppmi(pairs), np.arange(4), 5, seed=0)
    assert not own.any() and not vectors.any() and vectors.shape == (4, 5)
    pairs.add(np.zeros(3, dtype=np.int64), np.array([0, 1, 0]))
    vectors, own = vectors_of(ppmi(pairs), np.arange(4), 5, seed=0)
    assert own.tolist() == [True, True, False, False] and not vectors[:, 2:].any()
