"""How well the order of training mixes users, for windows of several sizes, against a permutation of everything.

In: sizes of a dataset. Out: two ratios for each size of window; 1 means as good as a full permutation.

    spread       variance from step to step of the mean position of a step's segments in the sorted dataset, divided by
                 that of a full permutation: how much a gradient sees of the order of user ids
    neighbours   how often two segments of one bucket meet in one step, divided by the same for a full permutation

Only the plan is used and no event is read: all segments have one length, all buckets one size.
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
"""About 4,096 events."""
NUM_ORDERS = 10
TOKENS = 43
"""Events of a segment."""


def measure_mixing(
    windows: tuple[int, ...] = WINDOWS,
    num_buckets: int = NUM_BUCKETS,
    segments_per_bucket: int = SEGMENTS_PER_BUCKET,
    num_orders: int = NUM_ORDERS,
) -> dict[str, Any]:
    """The two ratios for each size of window and for all buckets in one; each the mean over several orders."""

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
    """The segments, numbered through the sorted dataset, in the order in which the first epoch reads them."""
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
    """`spread` and `neighbours` of an order; see the module."""
    total, size = len(order), SEGMENTS_PER_STEP
    steps = order[: total // size * size].reshape(-1, size)
    expected = (total * total - 1) / 12 / size * (total - size) / (total - 1)
    # Pairs of one bucket in a step: by the counts of its buckets.
    buckets = np.sort(steps // segments_per_bucket, axis=1)
    place = np.repeat(np.arange(len(buckets), dtype=np.int64), size) * (total // segments_per_bucket) + buckets.ravel()
    counts = np.bincount(place).astype(np.float64)
    pairs = (counts * (counts - 1) / 2).sum() / len(steps)
    full = size * (size - 1) / 2 * (segments_per_bucket - 1) / (total - 1)
    return {"spread": float(steps.mean(axis=1).var() / expected), "neighbours": float(pairs / full)}
