"""AUC and log-loss against plain loops, and what drawing users again does."""

import numpy as np
import pytest

from tackboard.metrics.binary import (
    ProbabilityMetrics,
    UserResamples,
    auc,
    auc_of_users,
    interval,
    log_losses,
    logit,
)

RANDOM = np.random.default_rng(3)


def plain_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Every pair of a yes and a no, looked at."""
    wins = [
        1.0 if yes > no else 0.5 if yes == no else 0.0 for yes in scores[labels] for no in scores[~labels]
    ]  # fmt: skip
    return float(np.mean(wins)) if wins else float("nan")


@pytest.mark.parametrize("kinds", [2, 5, 10_000])
def test_auc_counts_pairs(kinds: int) -> None:
    scores, labels = RANDOM.integers(0, kinds, 80) / 7.0, RANDOM.random(80) < 0.3
    assert auc(scores, labels) == pytest.approx(plain_auc(scores, labels))
    assert auc(-scores, labels) == pytest.approx(1 - auc(scores, labels))


def test_auc_of_one_kind_is_not_a_number() -> None:
    assert np.isnan(auc(np.arange(3.0), np.ones(3, dtype=bool)))


def test_a_weight_of_two_is_two_examples() -> None:
    scores, labels = RANDOM.normal(size=30), RANDOM.random(30) < 0.5
    weights = RANDOM.integers(0, 3, 30)
    repeated = np.repeat(np.arange(30), weights)
    assert auc(scores, labels, weights) == pytest.approx(plain_auc(scores[repeated], labels[repeated]))


def test_log_loss_is_that_of_the_probability() -> None:
    logits, labels = RANDOM.normal(size=20) * 3, RANDOM.random(20) < 0.5
    probability = 1 / (1 + np.exp(-logits))
    expected = -np.log(np.where(labels, probability, 1 - probability))
    assert np.allclose(log_losses(logits, labels), expected)
    assert np.isfinite(log_losses(np.array([900.0]), np.array([False]))).all()
    assert np.allclose(1 / (1 + np.exp(-logit(np.array([0.0, 0.3, 1.0])))), [0.01, 0.3, 0.99])


def test_auc_within_users() -> None:
    users = RANDOM.integers(0, 9, 120)
    scores, labels = RANDOM.normal(size=120), RANDOM.random(120) < 0.4
    labels[users == 4] = True
    expected = [plain_auc(scores[users == user], labels[users == user]) for user in range(9)]
    assert np.allclose(auc_of_users(scores, labels, users), expected, equal_nan=True)
    assert np.isnan(expected[4])
    weights = RANDOM.integers(1, 4, 120)
    repeated = np.repeat(np.arange(120), weights)
    weighted = auc_of_users(scores, labels, users, weights)
    assert np.allclose(weighted, auc_of_users(scores[repeated], labels[repeated], users[repeated]), equal_nan=True)


def measured(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> ProbabilityMetrics:
    metrics = ProbabilityMetrics()
    metrics.update(logits, labels, weights)
    return metrics


def test_entropy_and_calibration_are_those_of_the_definition() -> None:
    logits, labels = RANDOM.normal(size=50) * 2, RANDOM.random(50) < 0.3
    probability, mean = 1 / (1 + np.exp(-logits)), labels.mean()
    loss = -np.log(np.where(labels, probability, 1 - probability)).mean()
    found = measured(logits, labels).result()
    assert found["log_loss"] == pytest.approx(loss)
    assert found["ne"] == pytest.approx(loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))
    assert found["calibration"] == pytest.approx(probability.sum() / labels.sum())
    constant = measured(np.full(50, np.log(mean / (1 - mean))), labels).result()
    assert (constant["ne"], constant["calibration"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert np.isfinite(measured(np.array([900.0, -900.0]), np.array([False, True])).result()["calibration"])


def test_parts_and_weights_of_probabilities() -> None:
    logits, labels, weights = RANDOM.normal(size=50), RANDOM.random(50) < 0.5, RANDOM.integers(0, 4, 50)
    repeated = np.repeat(np.arange(50), weights)
    whole = measured(logits, labels, weights)
    assert whole.result() == pytest.approx(measured(logits[repeated], labels[repeated]).result())
    parts = measured(logits[:20], labels[:20], weights[:20])
    parts.merge(measured(logits[20:], labels[20:], weights[20:]))
    assert parts.result() == pytest.approx(whole.result())


def test_what_is_not_defined_is_not_a_number() -> None:
    assert all(np.isnan(value) for value in ProbabilityMetrics().result().values())
    yes, no = (measured(np.zeros(3), np.full(3, label)).result() for label in (True, False))
    assert np.isnan(yes["ne"]) and yes["calibration"] == pytest.approx(0.5)
    assert np.isnan(no["ne"]) and np.isnan(no["calibration"]) and no["log_loss"] == pytest.approx(np.log(2))


def test_resamples_repeat_whole_users() -> None:
    users = np.sort(RANDOM.integers(0, 12, 150))
    scores, labels = RANDOM.normal(size=150).round(1), RANDOM.random(150) < 0.5
    draws = UserResamples(users, num_resamples=7, seed=1)
    assert (draws.counts.sum(axis=1) == 12).all()
    per_user = auc_of_users(scores, labels, users)
    for number, counts in enumerate(draws.counts):
        taken = np.concatenate([np.flatnonzero(users == user) for user in range(12) for _ in range(int(counts[user]))])
        assert draws.auc(scores, labels)[number] == pytest.approx(plain_auc(scores[taken], labels[taken]))
        assert draws.mean(scores)[number] == pytest.approx(scores[taken].mean())
        drawn = np.repeat(np.arange(12), counts.astype(int))
        assert draws.mean_of_users(per_user)[number] == pytest.approx(np.nanmean(per_user[drawn]))
    again = UserResamples(users, num_resamples=7, seed=1)
    assert (again.counts == draws.counts).all(), "the same draws for every model"


def test_interval_holds_its_share() -> None:
    assert interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))
