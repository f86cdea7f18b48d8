"""Computes a paired bootstrap interval for the difference between two models on the same users.

The input is one number per user and model, for example whether the held-out item was among the first ten, averaged over
seeds. The output is the mean difference and its percentile interval over bootstrap draws of users. The comparison is
paired because users differ from each other far more than models do. Pairing cancels the differences between users.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tackboard.metrics.binary import interval

DRAWS_AT_ONCE = 1 << 22
"""About this number of users is drawn at once, which limits memory."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean difference and its bootstrap interval."""

    mean: float
    low: float
    high: float


def hits(ranks: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """Returns HR@k of each user: 1 if the 0-based rank is below k, else 0."""
    return np.asarray(ranks < k, dtype=np.float64)


def gains(ranks: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """Returns NDCG@k of each user: 1 / log2(rank + 2) if the 0-based rank is below k, else 0."""
    return np.where(ranks < k, 1.0 / np.log2(np.asarray(ranks, dtype=np.float64) + 2.0), 0.0)


def paired_bootstrap(
    a: NDArray[np.floating], b: NDArray[np.floating], num_resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> Difference:
    """Returns the mean of a - b over users, and the interval that contains the share `level` of the resampled means.

    `a` and `b` have one value per user. Each resample has the same number of users, drawn with replacement, and uses
    both values of each drawn user.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"shapes are {first.shape} and {second.shape}; needed: one value per user in both")
    if num_resamples < 1 or not 0 < level < 1:
        raise ValueError(f"cannot draw {num_resamples} resamples at level {level}; needed: 1 or more, 0 < level < 1")
    difference = first - second
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    at_once = max(1, DRAWS_AT_ONCE // len(difference))
    for begin in range(0, num_resamples, at_once):
        count = min(at_once, num_resamples - begin)
        chosen = generator.integers(0, len(difference), size=(count, len(difference)))
        means[begin : begin + count] = difference[chosen].mean(axis=1)
    low, high = interval(means, level)
    return Difference(mean=float(difference.mean()), low=low, high=high)
