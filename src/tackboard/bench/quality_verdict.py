"""Whether a difference that was measured goes the way it was published: two groups of seeds in, a word out.

A difference counts only if it stands out from both kinds of chance: that of users (the interval of the paired draws
excludes 0) and that of seeds (more than twice the standard error of the difference of means, where there are several).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

NUM_ERRORS = 2.0
"""Standard errors, by seeds, that a difference has to exceed."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A difference, the interval of its draws over users, and the figures of single seeds on both sides."""

    difference: float
    low: float
    high: float
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def seed_error(self) -> float:
        """Standard error of the difference by seeds; 0 where a side has only one."""
        if min(len(self.ours), len(self.theirs)) < 2:
            return 0.0
        return float(np.sqrt(sum(np.var(side, ddof=1) / len(side) for side in (self.ours, self.theirs))))

    @property
    def is_noise(self) -> bool:
        """Whether chance alone explains it."""
        return self.low <= 0.0 <= self.high or abs(self.difference) <= NUM_ERRORS * self.seed_error


def verdict(measured: Measured, published: int | None) -> str:
    """In a word. `published` is the sign of the published difference, 0 where there was next to none, None if none."""
    if published is None:
        return "within noise" if measured.is_noise else "better" if measured.difference > 0 else "worse"
    if published == 0:
        return "agree" if measured.is_noise else "disagree"
    if measured.is_noise:
        return "within noise"
    return "agree" if np.sign(measured.difference) == published else "disagree"
