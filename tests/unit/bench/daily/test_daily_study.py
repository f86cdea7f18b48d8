"""`bench daily`: figures over users, and the whole bench on a small world."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tackboard.bench.daily import daily_study, periods
from tackboard.bench.daily.daily_study import ARMS, CONTINUED, FROZEN, HEAD, LIVE, RETRAINED, measure, pooled
from tackboard.data.time_split import parse_instant


def test_figures_are_means_over_users() -> None:
    users = [np.array([3, 3, 8]), np.array([8])]
    ranks = {arm: [np.array([0, 20, 20]), np.array([20])] for arm in ARMS}
    ranks[HEAD] = [np.array([0, 3, 20]), np.array([2])]
    found = pooled([{"users": users[place], **{arm: ranks[arm][place] for arm in ARMS}} for place in (0, 1)])
    rows = {row["arm"]: row for row in found}
    assert rows[LIVE]["hr@10"] == pytest.approx((0.5 + 0) / 2)
    assert rows[HEAD]["hr@10"] == pytest.approx((1 + 0.5) / 2)
    assert rows[HEAD]["ndcg@10"] == pytest.approx(((1 + 1 / np.log2(5)) / 2 + (0 + 1 / np.log2(4)) / 2) / 2)
    mean, low, high = rows[HEAD]["hr@10_difference"]
    assert mean == pytest.approx(0.5) and low <= mean <= high
    assert (rows[HEAD]["periods_won"], rows[FROZEN]["periods_won"]) == (2, 0)


@pytest.mark.slow
def test_the_bench_on_a_small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm has the runs and tokens that the page says, a second call trains nothing, and the log is cut right."""
    plan = dataclasses.replace(periods.PLANS["news"], periods=2, tokens=80_000, max_users=60, tokens_per_step=2048)
    monkeypatch.setitem(periods.PLANS, "news", plan)
    result = measure(tmp_path, "news")
    assert [period["begin"] for period in result["periods"]] == [result["first_cut"], "2025-01-26"]
    assert {row["arm"] for row in result["arms"]} == set(ARMS)
    training = {row["arm"]: row for row in result["training"]}
    assert {arm: row["runs"] for arm, row in training.items()} == {FROZEN: 1, RETRAINED: 2, CONTINUED: 3}
    assert all(0.6 * plan.tokens < row["tokens"] <= 1.1 * plan.tokens for row in training.values())
    for period in result["periods"]:
        assert 0 < period["num_users"] <= 60 and 0.2 < period["never_seen_share"] < 1
    monkeypatch.setattr(daily_study, "run_command", None)
    again = measure(tmp_path, "news")
    assert (again["arms"], again["periods"]) == (result["arms"], result["periods"])
    study = daily_study.DailyStudy(
        plan, tmp_path, tmp_path / "news", plan.cuts(parse_instant("2025-01-26T20:00", "")), 0
    )
    ranks, _ = study.ranks(0)
    assert all(len(ranks[arm]) == len(ranks["users"]) for arm in ARMS)
