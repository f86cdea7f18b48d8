"""Measures how well the training order mixes users, for windows of several sizes, compared with a full permutation.

A window consists of several buckets (groups of users). The segments (pieces of histories) of a window are shuffled
together. For a dataset of a given size, this module returns two ratios per window size. A ratio of 1 means that the
order mixes as well as a full permutation.

    spread       Each segment has a position in the sorted dataset, and each step has a mean position. The ratio is the
                 variance of this mean over steps, divided by the variance for a full permutation. A large ratio means
                 that gradients depend on the order of user ids.
    neighbours   Some pairs of segments in a step come from the same bucket. The ratio is the number of such pairs,
                 divided by their number for a full permutation.

No event is read, because the step plan alone decides the order. All segments have the same length, and all buckets have
the same size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.data.step_plan import StepPlan

WINDOWS = (1, 4, 16, 64)
NUM_BUCKETS = 256
SEGMENTS_PER_BUCKET = 1_500
SEGMENTS_PER_STEP = 96
"""Number of segments in a step. Together they have about 4,096 events."""
NUM_ORDERS = 10
TOKENS = 43
"""Number of events in a segment."""


def measure_mixing(
    windows: tuple[int, ...] = WINDOWS,
    num_buckets: int = NUM_BUCKETS,
    segments_per_bucket: int = SEGMENTS_PER_BUCKET,
    num_orders: int = NUM_ORDERS,
) -> dict[str, Any]:
    """Returns the mean of each ratio over several orders, for each window size and for a window of all buckets."""

    def averaged(window: int) -> dict[str, float]:
        orders = (order_of(window, num_buckets, segments_per_bucket, seed) for seed in range(num_orders))
        found = [ratios(order, segments_per_bucket) for order in orders]
        return {name: round(float(np.mean([one[name] for one in found])), 2) for name in found[0]}

    return {
        "num_buckets": num_buckets,
        "segments_per_bucket": segments_per_bucket,
        "segments_per_step": SEGMENTS_PER_STEP,
        "num_orders": num_orders,
        "windows": {str(window): averaged(window) for window in (*windows, num_buckets)},
    }


def order_of(window: int, num_buckets: int, segments_per_bucket: int, seed: int) -> NDArray[np.int64]:
    """Returns the positions of segments in the sorted dataset, in the order in which the first epoch reads them."""
    plan = StepPlan(
        np.full(num_buckets, segments_per_bucket * TOKENS, dtype=np.int64),
        longest=TOKENS,
        tokens_per_step=SEGMENTS_PER_STEP * TOKENS,
        seed=seed,
        buckets_per_window=window,
    )
    parts = []
    for number in range(plan.num_windows):
        buckets = plan.buckets_of(0, number)
        segments = (buckets[:, None] * segments_per_bucket + np.arange(segments_per_bucket)).ravel()
        order, _ = plan.deal(0, number, np.full(len(segments), TOKENS, dtype=np.int64))
        parts.append(segments[order])
    return np.concatenate(parts)


def ratios(order: NDArray[np.int64], segments_per_bucket: int) -> dict[str, float]:
    """Returns `spread` and `neighbours` of an order; see the docstring of the module."""
    total, size = len(order), SEGMENTS_PER_STEP
    steps = order[: total // size * size].reshape(-1, size)
    expected = (total * total - 1) / 12 / size * (total - size) / (total - 1)
    # If a step holds n segments of one bucket, they form n (n - 1) / 2 pairs.
    buckets = np.sort(steps // segments_per_bucket, axis=1)
    place = np.repeat(np.arange(len(buckets), dtype=np.int64), size) * (total // segments_per_bucket) + buckets.ravel()
    counts = np.bincount(place).astype(np.float64)
    pairs = (counts * (counts - 1) / 2).sum() / len(steps)
    full = size * (size - 1) / 2 * (segments_per_bucket - 1) / (total - 1)
    return {"spread": float(steps.mean(axis=1).var() / expected), "neighbours": float(pairs / full)}
