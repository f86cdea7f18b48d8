"""Decides whether a measured difference is more than chance, and whether it agrees with the publication.

This module compares two methods, each with one figure per seed, and answers with a word, such as "better" or "within
noise". There are two kinds of chance. For the choice of users, the paired bootstrap gives an interval. For the choice
of seeds, Student's t with Welch's degrees of freedom gives a 95% interval. A difference counts only if both intervals
exclude 0. With one seed, only the interval over users is known, and an answer such as "better" becomes "better, one
seed". A method that does not depend on a seed, such as a ranking by counts, is called fixed and has one figure.

Not seeing a difference does not prove that there is none. So if the publication found almost no difference, the answer
is "agree" only if both intervals of the difference lie within ±`SAME_SHARE` times the figure of the second method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SAME_SHARE = 0.02
"""Two figures count as equal if they differ by less than this share of the second figure."""
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles of Student's t with 1, 2, 3, … degrees of freedom. The last quantile also serves for more degrees."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A difference between two methods, its interval over draws of users, and the figures of both methods per seed."""

    difference: float
    low: float
    high: float
    ours: Sequence[float]
    theirs: Sequence[float]
    is_fixed: bool = False
    """If true, `theirs` is one figure that does not depend on a seed."""

    @property
    def seed_error(self) -> float | None:
        """Standard error of the difference over seeds; None if a method that depends on the seed has only one seed."""
        if self._is_of_one_seed:
            return None
        return float(np.sqrt(sum(share for share, _ in self._shares())))

    @property
    def reach(self) -> tuple[float, float]:
        """The smallest interval that holds both the interval over users and the interval over seeds."""
        error = self.seed_error
        half = 0.0 if not error else error * _t_quantile(self._degrees_of_freedom())
        return min(self.low, self.difference - half), max(self.high, self.difference + half)

    @property
    def is_noise(self) -> bool:
        """Whether chance alone may explain the difference."""
        low, high = self.reach
        return low <= 0.0 <= high

    @property
    def _is_of_one_seed(self) -> bool:
        return len(self.ours) < 2 or (len(self.theirs) < 2 and not self.is_fixed)

    def _shares(self) -> list[tuple[float, int]]:
        """Returns (squared standard error of the mean over seeds, degrees of freedom) for each method with seeds."""
        sides = (self.ours,) if self.is_fixed else (self.ours, self.theirs)
        return [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in sides]

    def _degrees_of_freedom(self) -> float:
        """Returns the degrees of freedom by Welch and Satterthwaite."""
        shares = self._shares()
        return sum(share for share, _ in shares) ** 2 / sum(share**2 / freedom for share, freedom in shares)


def _t_quantile(degrees_of_freedom: float) -> float:
    """Returns the quantile. Rounds the degrees of freedom down, so an interval may be too wide, but not too narrow."""
    # A rounding error may make the degrees of freedom slightly smaller than the whole number that they should be.
    return T_QUANTILES[min(max(1, int(degrees_of_freedom + 1e-9)), len(T_QUANTILES)) - 1]


def verdict(measured: Measured, published: int | None, *, is_lower_better: bool = False) -> str:
    """Returns the verdict in words. `published` is 1 for better, -1 for worse, 0 for about equal, None if unknown."""
    if measured.is_noise and published != 0:
        return "within noise"
    is_better = (measured.difference > 0) != is_lower_better
    if published is None:
        word = "better" if is_better else "worse"
    elif published == 0:
        word = _same(measured)
    else:
        word = "agree" if is_better == (published > 0) else "disagree"
    return f"{word}, one seed" if measured.seed_error is None and word != "cannot tell" else word


def _same(measured: Measured) -> str:
    """Returns "agree" if both methods are about equal, "disagree" if they clearly differ, else "cannot tell"."""
    margin = SAME_SHARE * abs(float(np.mean(measured.theirs)))
    low, high = measured.reach
    if -margin < low and high < margin:
        return "agree"
    return "disagree" if low > margin or high < -margin else "cannot tell"


# ---- for tables ----

DIFFERENCE_COLUMNS = ("difference", "95% from", "to", "error by seeds")


def figures_of(measured: Measured, published: int | None = None, *, is_lower_better: bool = False) -> dict[str, Any]:
    """Returns a difference as numbers, with its verdict."""
    return {
        "difference": measured.difference,
        "low": measured.low,
        "high": measured.high,
        "seed_error": measured.seed_error,
        "verdict": verdict(measured, published, is_lower_better=is_lower_better),
    }


def difference_cells(figures: Mapping[str, Any]) -> list[str]:
    """Returns the result of `figures_of` as text, in the order of DIFFERENCE_COLUMNS."""
    error = figures["seed_error"]
    numbers = [f"{figures[key]:+.4f}" for key in ("difference", "low", "high")]
    return [*numbers, "" if error is None else f"{error:.4f}"]
