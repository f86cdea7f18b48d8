"""Logistic regression and boosted trees, against plain twins and on tasks with known answers."""

import numpy as np
import pytest

from tackboard.bench.transfer.classifiers import (
    NUM_BINS,
    BoostedTrees,
    LogisticRegression,
    TreeSettings,
    bin_edges,
    binned_rows,
    grow,
    sigmoid,
)
from tackboard.metrics.binary import auc, log_losses


def drawn(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which the first two columns decide together, the third is noise, and the fourth is constant."""
    random = np.random.default_rng(seed)
    rows = np.concatenate([random.normal(size=(count, 3)).round(1), np.ones((count, 1))], axis=1)
    return rows, random.random(count) < sigmoid(3.0 * rows[:, 0] * (rows[:, 1] > 0) - 0.5)


def plain_tree(binned: np.ndarray, gradients: np.ndarray, curvatures: np.ndarray, settings: TreeSettings) -> np.ndarray:
    """What one tree adds to each row: the same tree, by recursion and explicit sums."""
    added = np.zeros(len(binned))

    def value(rows: np.ndarray) -> float:
        return float(gradients[rows].sum() ** 2 / (curvatures[rows].sum() + settings.damping))

    def split(rows: np.ndarray, depth: int) -> None:
        best, sides = 0.0, None
        for column in range(binned.shape[1]) if depth < settings.depth else ():
            for edge in range(NUM_BINS):
                left, right = rows[binned[rows, column] <= edge], rows[binned[rows, column] > edge]
                if min(curvatures[left].sum(), curvatures[right].sum()) < settings.least_curvature:
                    continue
                gain = value(left) + value(right) - value(rows)
                if gain > best + 1e-9:
                    best, sides = gain, (left, right)
        if sides is None:
            total = gradients[rows].sum() / (curvatures[rows].sum() + settings.damping)
            added[rows] = -settings.learning_rate * total
            return
        for side in sides:
            split(side, depth + 1)

    split(np.arange(len(binned)), 0)
    return added


@pytest.mark.parametrize("depth", [1, 3])
def test_a_tree_is_that_of_its_plain_twin(depth: int) -> None:
    rows, labels = drawn()
    settings = TreeSettings(depth=depth, least_curvature=2.0)
    binned = binned_rows(rows, [bin_edges(column) for column in rows.T])
    shares = sigmoid(np.random.default_rng(1).normal(size=len(rows)))
    tree = grow(binned, shares - labels, shares * (1 - shares), settings)
    found = tree.leaves[tree.leaf_of(binned)]
    assert np.allclose(found, plain_tree(binned, shares - labels, shares * (1 - shares), settings))
    assert len(np.unique(found.round(12))) > 1


def test_bins_hold_equal_values_together() -> None:
    few = np.array([3.0, 1.0, 1.0, 2.0])
    assert binned_rows(few[:, None], [bin_edges(few)])[:, 0].tolist() == [2, 0, 0, 1]
    assert len(bin_edges(np.ones(5))) == 0
    many = np.random.default_rng(0).normal(size=10_000)
    binned = binned_rows(many[:, None], [bin_edges(many)])[:, 0]
    sizes = np.bincount(binned, minlength=NUM_BINS)
    assert len(sizes) == NUM_BINS and sizes.max() < 3 * len(many) / NUM_BINS
    assert (np.diff(binned[np.argsort(many)].astype(int)) >= 0).all()


def test_trees_learn_what_a_linear_model_cannot_and_stop_by_validation() -> None:
    rows, labels = drawn(2_000)
    held_out, truth = drawn(1_000, seed=1)
    trees = BoostedTrees.fit(rows, labels, (held_out, truth), TreeSettings(depth=3))
    assert 0 < len(trees.trees) < TreeSettings().num_rounds
    found = trees.log_odds(held_out)
    assert trees.validation_loss == pytest.approx(log_losses(found, truth).mean())
    best = log_losses(3.0 * held_out[:, 0] * (held_out[:, 1] > 0) - 0.5, truth).mean()
    linear = LogisticRegression.fit(rows, labels, 1.0).log_odds(held_out)
    assert best < trees.validation_loss < best + 0.05 and auc(found, truth) > auc(linear, truth) + 0.02


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_logistic_regression_is_at_its_minimum(penalty: float) -> None:
    rows, labels = drawn()
    fit = LogisticRegression.fit(rows, labels, penalty)
    assert fit.weights[4] == 0.0, "a constant column"
    scaled = np.concatenate([np.ones((len(rows), 1)), (rows[:, :3] - fit.means[:3]) / rows[:, :3].std(axis=0)], axis=1)
    weights = fit.weights[:4]
    assert np.allclose(fit.log_odds(rows), scaled @ weights)
    slopes = scaled.T @ (sigmoid(scaled @ weights) - labels) + penalty * np.append(0.0, weights[1:])
    assert np.abs(slopes).max() < 1e-3


def test_alike_labels_give_finite_odds() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 2))
    labels = np.zeros(50, dtype=np.bool_)
    assert np.isfinite(LogisticRegression.fit(rows, labels, 1.0).log_odds(rows)).all()
    assert np.isfinite(BoostedTrees.fit(rows, labels, (rows, labels), TreeSettings()).log_odds(rows)).all()
