"""Measures properties of the first items of rankings that do not depend on whether the items are right.

    coverage      share of the catalogue that is among the first items of at least one ranking
    novelty       mean of −log2(share of the training events of an item): 10 means one event in a thousand
    repeat share  share of the first items that the user had seen before

The input is the first items of J rankings, as positions in the catalogue [J, k]; -1 fills up rankings that have fewer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def coverage(top: NDArray[np.int64], num_items: int) -> float:
    """Returns the share of `num_items` items that occur in `top`."""
    return len(np.unique(top[top >= 0])) / max(1, num_items)


def novelty(top: NDArray[np.int64], counts: NDArray[np.int64]) -> float:
    """Returns the mean novelty in bits. `counts` [V] holds the events of each item; 0 events count as half an event."""
    shares = np.maximum(counts, 0.5) / max(1, int(counts.sum()))
    found = top[top >= 0]
    return float(-np.log2(shares)[found].mean()) if found.size else 0.0


def repeat_share(top: NDArray[np.int64], was_seen: NDArray[np.bool_]) -> float:
    """Returns the share of `top` that the user had seen before, as `was_seen` [J, k] says."""
    return float(was_seen[top >= 0].mean()) if (top >= 0).any() else 0.0
