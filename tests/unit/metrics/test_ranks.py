"""HR@k and NDCG@k: by hand, merged from parts, and pessimistic about ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.metrics.ranks import RankingMetrics, ranks_of_targets


def metrics_of(ranks: list[int], cutoffs: tuple[int, ...] = (1, 3)) -> RankingMetrics:
    metrics = RankingMetrics(cutoffs)
    metrics.update(np.array(ranks, dtype=np.int64))
    return metrics


def test_by_hand() -> None:
    assert metrics_of([0, 2, 3, 0]).result() == pytest.approx(
        {"hr@1": 0.5, "hr@3": 0.75, "ndcg@1": 0.5, "ndcg@3": (1 + 1 / math.log2(4) + 1) / 4}
    )
    assert metrics_of([]).result() == {"hr@1": 0, "hr@3": 0, "ndcg@1": 0, "ndcg@3": 0}


def test_ties_count_against_the_target() -> None:
    scores = np.array([[1.0, 1.0, 1.0], [3.0, 2.0, 2.0], [0.0, -np.inf, 5.0]], dtype=np.float32)
    assert ranks_of_targets(scores, np.array([0, 1, 2])).tolist() == [2, 2, 0]


def test_a_score_that_is_no_number_ranks_last() -> None:
    scores = np.array([[np.nan, 1.0, 2.0], [np.nan, 1.0, np.nan], [np.nan] * 3], dtype=np.float32)
    assert ranks_of_targets(scores, np.array([0, 1, 2])).tolist() == [2, 2, 2]


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=40)
def test_rank_counts_the_others_that_are_as_good(rows: list[list[int]], target: int) -> None:
    targets = np.full(len(rows), target)
    expected = [sum(score >= row[target] for place, score in enumerate(row) if place != target) for row in rows]
    for scores in (np.array(rows, dtype=np.float64), torch.tensor(rows), torch.tensor(rows, dtype=torch.bfloat16)):
        ranks = ranks_of_targets(scores, targets)
        assert ranks.dtype == np.int64
        assert ranks.tolist() == expected
