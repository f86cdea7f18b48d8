"""Figures per user, and the paired bootstrap against cases whose answer is known."""

import math

import numpy as np
import pytest

from tackboard.metrics import paired
from tackboard.metrics.paired import Difference, gains, hits, paired_bootstrap
from tackboard.metrics.ranks import RankingMetrics


def test_figures_per_user_average_to_the_metrics() -> None:
    ranks = np.array([0, 1, 9, 10, 49, 50, 3_000])
    metrics = RankingMetrics((10, 50))
    metrics.update(ranks)
    expected = metrics.result()
    for k in (10, 50):
        assert hits(ranks, k).mean() == pytest.approx(expected[f"hr@{k}"])
        assert gains(ranks, k).mean() == pytest.approx(expected[f"ndcg@{k}"])
    assert gains(ranks, 10)[1] == 1 / math.log2(3)


def test_interval_is_that_of_the_normal_approximation() -> None:
    draw = np.random.default_rng(3)
    common = draw.normal(0, 10, 4_000)  # What users have in common with both drops out.
    a, b = common + draw.normal(0.1, 1, 4_000), common
    found = paired_bootstrap(a, b, 4_000, seed=1)
    difference = a - b
    error = difference.std() / math.sqrt(len(difference))
    assert found.mean == pytest.approx(difference.mean())
    assert found.low == pytest.approx(difference.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(difference.mean() + 1.96 * error, abs=0.15 * error)
    assert found.low > 0


def test_interval_of_two_users_is_exact() -> None:
    # The mean of two draws from {0, 1} is 0, 0.5 or 1 with probabilities 1/4, 1/2, 1/4.
    found = paired_bootstrap(np.array([0.0, 1.0]), np.zeros(2), 1_000, level=0.4)
    assert found == Difference(0.5, 0.5, 0.5)
    assert paired_bootstrap(np.array([0.0, 1.0]), np.zeros(2), 1_000, level=0.9) == Difference(0.5, 0.0, 1.0)


def test_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(11)
    inside = 0
    for number in range(200):
        a, b = draw.random(300) < 0.33, draw.random(300) < 0.30
        found = paired_bootstrap(a.astype(float), b.astype(float), 300, seed=number)
        inside += found.low <= 0.03 <= found.high
    assert 180 <= inside <= 199


def test_is_a_function_of_the_seed_whatever_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.random.default_rng(0).random((2, 50))
    whole = paired_bootstrap(a, b, 64, seed=5)
    monkeypatch.setattr(paired, "DRAWS_AT_ONCE", 170)
    assert paired_bootstrap(a, b, 64, seed=5) == whole
    assert paired_bootstrap(a, b, 64, seed=6) != whole


@pytest.mark.parametrize(
    ("shapes", "num_resamples", "level"),
    [((3, 4), 10, 0.95), ((0, 0), 10, 0.95), ((3, 3), 0, 0.95), ((3, 3), 10, 1.0)],
)
def test_what_cannot_be_paired_is_refused(shapes: tuple[int, int], num_resamples: int, level: float) -> None:
    with pytest.raises(ValueError, match="needed|resamples"):
        paired_bootstrap(np.zeros(shapes[0]), np.zeros(shapes[1]), num_resamples, level=level)
