"""What a fixed length changes: measured over the requests that it changes, by definitions that are checked here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tackboard.bench.dcat.fixed_length import QUICK, STUDIED, compare_scores, kendall, study_config
from tackboard.evaluation.labelled_requests import ScoredCandidates


def scored(scores: list[float]) -> ScoredCandidates:
    return ScoredCandidates(
        scores=np.array(scores),
        users=np.array([1, 1, 1, 2, 2, 2]),
        items=np.arange(6),
        labels={"next": np.array([1, 0, 0, 0, 1, 0], dtype=np.int8)},
        requests=np.array([0, 0, 0, 1, 1, 1]),
    )


def test_kendall_counts_pairs() -> None:
    order = np.array([3.0, 2.0, 1.0, 0.0])
    assert kendall(order, order * 2) == 1.0
    assert kendall(order, -order) == -1.0
    assert kendall(order, np.array([2.0, 3.0, 1.0, 0.0])) == pytest.approx((5 - 1) / 6)
    assert kendall(order[:1], order[:1]) == 1.0


def test_only_changed_requests_count() -> None:
    full = scored([1.0, 0.0, -1.0, 0.5, 0.2, 0.1])
    found = compare_scores(full, scored([1.0, 0.0, -1.0, 0.2, 0.5, 0.1]))
    assert found["changed"] == 0.5
    assert found["difference"] == pytest.approx(0.2 / full.scores.std())
    assert found["kendall"] == pytest.approx(1 / 3)
    assert found["same_best"] == 0.0
    assert found["hit@3"] == 1.0
    same = compare_scores(full, full)
    assert (same["changed"], same["difference"], same["kendall"], same["same_best"]) == (0.0, 0.0, 1.0, 1.0)


def test_fewer_slots_change_more_requests(dcat_result: dict[str, Any]) -> None:
    found = dcat_result["fixed_length"]
    assert [line["length"] for line in found["lengths"]] == list(QUICK.lengths)
    shares = [line["changed"] for line in found["lengths"]]
    assert 0 < shares[0] < shares[1] <= 1
    assert all(-1 <= line["kendall"] <= 1 and 0 <= line["same_best"] <= 1 for line in found["lengths"])
    assert found["requests"] > 0


def test_the_longest_fixed_length_overwrites_slots_of_a_full_context() -> None:
    for preset in (QUICK, STUDIED):
        assert max(preset.lengths) == preset.max_history
        assert study_config(preset, __file__).model.fusion.fixed_length == 0  # type: ignore[arg-type]
