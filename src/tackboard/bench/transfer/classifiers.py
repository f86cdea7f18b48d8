"""Predicts yes or no from rows of numbers: logistic regression, and gradient-boosted trees on histograms.

Both are small NumPy versions of the usual methods, so that the bench needs no further package. Both learn from rows
[E, F] with labels, and return log odds. Logistic regression minimises the log-loss plus a penalty on squared weights by
Newton's method, on standardised columns. The trees grow level by level: each column is cut into at most 64 bins, a node
is split at the bin that lowers the second-order approximation of the log-loss most, and a leaf adds a damped Newton
step. Learning ends when the log-loss on validation rows has not improved for some rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tackboard.metrics.binary import log_losses

Numbers = NDArray[np.float64]
Labels = NDArray[np.bool_]
NUM_BINS = 64
LEAST_SHARE = 1e-6
"""Mean labels are kept between this share and 1 minus this share, so that log odds are finite."""


def first_log_odds(labels: Labels) -> float:
    """Returns the log odds of the mean label."""
    share = float(np.clip(labels.mean() if len(labels) else 0.5, LEAST_SHARE, 1.0 - LEAST_SHARE))
    return float(np.log(share) - np.log1p(-share))


def sigmoid(logits: Numbers) -> Numbers:
    """Returns probabilities."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)))


@dataclasses.dataclass(frozen=True)
class LogisticRegression:
    """A linear model on standardised columns. Columns that are constant in training get the weight 0."""

    means: Numbers
    scales: Numbers
    weights: Numbers
    """The intercept and the weight of each column [1 + F]."""

    @classmethod
    def fit(cls, rows: Numbers, labels: Labels, penalty: float, num_steps: int = 50) -> LogisticRegression:
        """Minimises the summed log-loss plus `penalty` / 2 × the squared weights. The intercept has no penalty."""
        spread = rows.std(axis=0)
        means, scales = rows.mean(axis=0), np.where(spread > 0, spread, np.inf)
        inputs = _with_one((rows - means) / scales)
        penalties = np.append(0.0, np.full(rows.shape[1], penalty))
        weights = np.append(first_log_odds(labels), np.zeros(rows.shape[1]))

        def objective(tried: Numbers) -> float:
            return float(log_losses(inputs @ tried, labels).sum() + 0.5 * (penalties * tried**2).sum())

        best = objective(weights)
        for _ in range(num_steps):
            shares = sigmoid(inputs @ weights)
            gradient = inputs.T @ (shares - labels) + penalties * weights
            curvature = (inputs * (shares * (1.0 - shares))[:, None]).T @ inputs
            step = np.linalg.solve(curvature + np.diag(penalties + 1e-9), gradient)
            size = 1.0
            while (value := objective(weights - size * step)) > best and size > 1e-6:
                size /= 2
            if best - value < 1e-9 * max(1.0, abs(best)):
                break
            weights, best = weights - size * step, value
        return cls(means, scales, weights)

    def log_odds(self, rows: Numbers) -> Numbers:
        """Returns the log odds of yes [E]."""
        return np.asarray(_with_one((rows - self.means) / self.scales) @ self.weights)


def _with_one(rows: Numbers) -> Numbers:
    return np.concatenate([np.ones((len(rows), 1)), rows], axis=1)


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """How trees grow."""

    depth: int = 4
    """Number of levels of splits."""
    learning_rate: float = 0.1
    num_rounds: int = 400
    """Largest number of trees."""
    patience: int = 20
    """Learning ends after this many trees without a better validation loss."""
    damping: float = 1.0
    """Added to the curvature of each leaf."""
    least_curvature: float = 5.0
    """Smallest curvature (sum of p × (1 − p)) of a leaf; 5 is about twenty examples with even odds."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree whose nodes are numbered level by level: the children of node n are 2 n + 1 and 2 n + 2.

    A node whose bin is NUM_BINS sends every row to its left child.
    """

    columns: NDArray[np.int64]
    """The column that each inner node reads."""
    bins: NDArray[np.int64]
    """The last bin of this column that goes to the left child."""
    leaves: Numbers
    """What each leaf adds to the log odds."""

    def leaf_of(self, binned: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Returns the leaf of each row, counted from 0 [E]."""
        node, here = np.zeros(len(binned), dtype=np.int64), np.arange(len(binned))
        for _ in range(len(self.leaves).bit_length() - 1):
            node = 2 * node + 1 + (binned[here, self.columns[node]] > self.bins[node])
        return node - len(self.columns)


@dataclasses.dataclass(frozen=True)
class BoostedTrees:
    """A sum of trees on binned columns."""

    edges: Sequence[Numbers]
    """The upper edges of each column's bins. The last bin has no upper edge."""
    base: float
    trees: Sequence[Tree]
    validation_loss: float

    @classmethod
    def fit(
        cls, rows: Numbers, labels: Labels, validation: tuple[Numbers, Labels], settings: TreeSettings
    ) -> BoostedTrees:
        """Grows trees until the log-loss on `validation` (rows, labels) stops falling, and keeps the best number of
        trees."""
        edges = [bin_edges(column) for column in rows.T]
        binned, held_out = binned_rows(rows, edges), binned_rows(validation[0], edges)
        base = first_log_odds(labels)
        logits, judged = np.full(len(rows), base), np.full(len(held_out), base)
        trees: list[Tree] = []
        best, kept = float(log_losses(judged, validation[1]).mean()), 0
        while len(trees) < settings.num_rounds and len(trees) - kept < settings.patience:
            shares = sigmoid(logits)
            tree = grow(binned, shares - labels, shares * (1.0 - shares), settings)
            trees.append(tree)
            logits += tree.leaves[tree.leaf_of(binned)]
            judged += tree.leaves[tree.leaf_of(held_out)]
            if (loss := float(log_losses(judged, validation[1]).mean())) < best:
                best, kept = loss, len(trees)
        return cls(edges, base, trees[:kept], best)

    def log_odds(self, rows: Numbers) -> Numbers:
        """Returns the log odds of yes [E]."""
        binned, total = binned_rows(rows, self.edges), np.full(len(rows), self.base)
        for tree in self.trees:
            total += tree.leaves[tree.leaf_of(binned)]
        return total


def bin_edges(column: Numbers) -> Numbers:
    """Returns at most NUM_BINS − 1 edges between the values of a column, at its quantiles."""
    distinct = np.unique(column)
    if len(distinct) > NUM_BINS:
        distinct = np.unique(np.quantile(column, np.linspace(0, 1, NUM_BINS), method="lower"))
    return np.asarray((distinct[:-1] + distinct[1:]) / 2)


def binned_rows(rows: Numbers, edges: Sequence[Numbers]) -> NDArray[np.uint8]:
    """Returns the bin of each number [E, F]."""
    columns = [np.searchsorted(edge, column, side="left") for edge, column in zip(edges, rows.T, strict=True)]
    return np.stack(columns, axis=1).astype(np.uint8)


def grow(binned: NDArray[np.uint8], gradients: Numbers, curvatures: Numbers, settings: TreeSettings) -> Tree:
    """Grows one tree. A node whose best split gains nothing sends every row to its left child."""
    num_columns, num_inner = binned.shape[1], 2**settings.depth - 1
    columns = np.zeros(num_inner, dtype=np.int64)
    bins = np.full(num_inner, NUM_BINS, dtype=np.int64)
    node, here = np.zeros(len(binned), dtype=np.int64), np.arange(len(binned))
    flat = (np.arange(num_columns) * NUM_BINS + binned).astype(np.int64)
    for level in range(settings.depth):
        first, count = 2**level - 1, 2**level
        places = ((node - first)[:, None] * (num_columns * NUM_BINS) + flat).ravel()
        shape = (count, num_columns, NUM_BINS)
        sums = [
            np.cumsum(
                np.bincount(places, np.repeat(values, num_columns), minlength=int(np.prod(shape))).reshape(shape),
                axis=2,
            )
            for values in (gradients, curvatures)
        ]
        gains = gains_of_splits(sums[0], sums[1], settings).reshape(count, -1)
        best = gains.argmax(axis=1)
        is_split = gains[np.arange(count), best] > 0
        columns[first : first + count] = np.where(is_split, best // NUM_BINS, 0)
        bins[first : first + count] = np.where(is_split, best % NUM_BINS, NUM_BINS)
        node = 2 * node + 1 + (binned[here, columns[node]] > bins[node])
    leaf = node - num_inner
    totals = [np.bincount(leaf, values, minlength=num_inner + 1) for values in (gradients, curvatures)]
    return Tree(columns, bins, -settings.learning_rate * totals[0] / (totals[1] + settings.damping))


def gains_of_splits(gradients: Numbers, curvatures: Numbers, settings: TreeSettings) -> Numbers:
    """Returns how much each split lowers the loss; −1 if a side would be too small. The inputs are sums up to each bin
    [nodes, F, bins]."""
    all_gradients, all_curvatures = gradients[..., -1:], curvatures[..., -1:]

    def value(gradient: Numbers, curvature: Numbers) -> Numbers:
        return np.asarray(gradient**2 / (curvature + settings.damping))

    gains = (
        value(gradients, curvatures)
        + value(all_gradients - gradients, all_curvatures - curvatures)
        - value(all_gradients, all_curvatures)
    )
    least = settings.least_curvature
    is_allowed = (curvatures >= least) & (all_curvatures - curvatures >= least)
    return np.where(is_allowed, gains, -1.0)
