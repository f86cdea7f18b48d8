"""Metrics of yes-or-no predictions: AUC, log-loss, normalised entropy and calibration from logits and labels.

AUC is the chance that an example with label yes scores higher than an example with label no; a tie counts half. AUC
says how well examples are ordered; log-loss says whether probabilities are right. AUC within users is the mean AUC of
the users who have both labels, so a model gains nothing by separating users who often say yes from users who rarely do.
Normalised entropy (NE) is the log-loss divided by the log-loss of a constant prediction, the mean label. A model with
NE below 1 is better than the constant. Calibration is the sum of the probabilities divided by the number of labels yes.
The best calibration is 1.

Examples of one user are alike, so an interval must come from resampling users, not examples. `UserResamples` makes the
draws once and computes a metric for each draw. Two models are compared on the same draws.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating]
Labels = NDArray[np.bool_]


def auc(scores: Scores, labels: Labels, weights: NDArray[np.floating] | None = None) -> float:
    """Returns the chance that a yes scores above a no; a tie counts half. Returns NaN if all labels are the same.

    An example of weight 2 counts as two examples.
    """
    _, groups = np.unique(scores, return_inverse=True)
    return _auc_of_groups(groups, labels, np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64))


def log_losses(logits: Scores, labels: Labels) -> NDArray[np.float64]:
    """Returns −log of the probability that the model gave to the true label of each example [E]."""
    signed = np.where(labels, logits, -np.asarray(logits, dtype=np.float64))
    return np.asarray(np.logaddexp(0.0, -signed))


def logit(probabilities: NDArray[np.floating], least: float = 0.01) -> NDArray[np.float64]:
    """Returns the log odds of probabilities, which are clipped to the range from `least` to 1 − `least`."""
    held = np.clip(np.asarray(probabilities, dtype=np.float64), least, 1.0 - least)
    return np.log(held) - np.log1p(-held)


@dataclasses.dataclass
class ProbabilityMetrics:
    """Log-loss, NE and calibration over all examples that calls of `update` added. The fields are weighted sums."""

    examples: float = 0.0
    positives: float = 0.0
    probabilities: float = 0.0
    losses: float = 0.0

    def update(self, logits: Scores, labels: Labels, weights: NDArray[np.floating] | None = None) -> None:
        """Adds examples. An example of weight 2 counts as two examples."""
        given = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
        self.examples += float(given.sum())
        self.positives += float(given[labels].sum())
        # The probability of yes is exp(−loss), where the loss is computed as if the example's label were yes.
        self.probabilities += float((given * np.exp(-log_losses(logits, np.ones(len(labels), dtype=np.bool_)))).sum())
        self.losses += float((given * log_losses(logits, labels)).sum())

    def merge(self, other: ProbabilityMetrics) -> None:
        """Adds the examples of `other`."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def result(self) -> dict[str, float]:
        """Returns `log_loss`, `ne` and `calibration`. An undefined value, such as NE if all labels agree, is NaN."""
        if not self.examples:
            return dict.fromkeys(("log_loss", "ne", "calibration"), float("nan"))
        mean, loss = self.positives / self.examples, self.losses / self.examples
        entropy = -mean * np.log(mean) - (1 - mean) * np.log1p(-mean) if 0 < mean < 1 else 0.0
        return {
            "log_loss": loss,
            "ne": float(loss / entropy) if entropy else float("nan"),
            "calibration": self.probabilities / self.positives if self.positives else float("nan"),
        }


def auc_of_users(
    scores: Scores, labels: Labels, users: NDArray[np.int64], weights: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """Returns the AUC of each user's examples [U], or NaN for a user with only one of the two labels. `users` holds the
    user of each example, counted from 0. An example of weight 2 counts as two examples."""
    found = np.full(int(users.max(initial=-1)) + 1, np.nan)
    order = np.argsort(users, kind="stable")
    bounds = np.searchsorted(users[order], np.arange(len(found) + 1))
    for user in range(len(found)):
        mine = order[bounds[user] : bounds[user + 1]]
        if len(mine) > 1 and 0 < int(labels[mine].sum()) < len(mine):
            found[user] = auc(scores[mine], labels[mine], None if weights is None else weights[mine])
    return found


class UserResamples:
    """Bootstrap draws of users, with replacement. The same arguments give the same draws."""

    def __init__(self, users: NDArray[np.int64], num_resamples: int = 1000, seed: int = 0) -> None:
        """`users` [E] holds the user of each example, counted from 0."""
        self.users = users
        num_users = int(users.max(initial=-1)) + 1
        generator = np.random.default_rng(seed)
        self.counts = np.empty((num_resamples, num_users), dtype=np.float64)
        """The number of times that each draw contains each user [R, U]."""
        for draw in range(num_resamples):
            self.counts[draw] = np.bincount(generator.integers(0, num_users, size=num_users), minlength=num_users)

    def auc(self, scores: Scores, labels: Labels) -> NDArray[np.float64]:
        """Returns the AUC over all examples of the drawn users, for each draw [R]."""
        _, groups = np.unique(scores, return_inverse=True)
        return np.array([_auc_of_groups(groups, labels, counts[self.users]) for counts in self.counts])

    def mean(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Returns, for each draw [R], the mean of `values` (one per example) over the examples of the drawn users."""
        sums = np.bincount(self.users, values, minlength=self.counts.shape[1])
        sizes = np.bincount(self.users, minlength=self.counts.shape[1]).astype(np.float64)
        return np.asarray((self.counts @ sums) / (self.counts @ sizes))

    def mean_of_users(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Returns, for each draw [R], the mean of `values` (one per user) over the drawn users. Skips NaN values."""
        known = ~np.isnan(values)
        return np.asarray((self.counts @ np.where(known, values, 0.0)) / (self.counts @ known.astype(np.float64)))


def interval(values: NDArray[np.floating], level: float = 0.95) -> tuple[float, float]:
    """Returns the percentile interval of a metric, given its value in each draw."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _auc_of_groups(groups: NDArray[np.int64], labels: Labels, weights: NDArray[np.float64]) -> float:
    """Returns the weighted AUC. `groups` holds the rank of each score among the distinct scores, lowest first."""
    positive = np.bincount(groups, np.where(labels, weights, 0.0))
    negative = np.bincount(groups, np.where(labels, 0.0, weights))
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / pairs)
