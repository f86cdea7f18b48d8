"""The report of `bench daily`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tackboard.bench.daily.daily_study import ARMS, HEAD, LIVE
from tackboard.bench.daily.daily_tables import daily_report
from tackboard.bench.daily.periods import PLANS
from tackboard.bench.report import table_lines, where_and_when, write_result


def result(low: float) -> dict[str, Any]:
    figures = {arm: {"hr@10": 0.1 + 0.01 * place, "ndcg@10": 0.05} for place, arm in enumerate(ARMS)}
    period = {"num_events": 1200, "num_users": 300, "never_seen_share": 0.25, "item_age_h": 7.5, "live_h": 3.0}
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        row: dict[str, Any] = {"arm": arm, "periods_won": 1, **figures[arm]}
        if arm != LIVE:
            row |= {"hr@10_difference": [0.02, low, 0.04], "ndcg@10_difference": [0.02, low, 0.04]}
        if arm == HEAD:
            row |= {"hr@10_over_alone": [0.01, 0.005, 0.015], "ndcg@10_over_alone": [0.0, -0.01, 0.01]}
        rows.append(row)
    return {
        "bench": "daily",
        "quick": False,
        "seed": 0,
        "plan": dataclasses.asdict(PLANS["deskdrop"]),
        "first_cut": "2016-12-08",
        "end": "2017-03-02",
        "periods": [{"begin": f"2017-01-0{day}", **period, "arms": figures} for day in (1, 2)],
        "arms": rows,
        "training": [{"arm": "frozen", "runs": 1, "tokens": 1_000_000, "cpu_s": 61.0}],
        **where_and_when(),
    }


def test_the_report_says_whether_the_aim_is_met(tmp_path: Path) -> None:
    report = daily_report(result(low=0.01))
    assert "Met: the best arm is" in report.notes[0] and HEAD in report.notes[0]
    lines = "\n".join(table_lines(report))
    assert "+0.0200 [+0.0100, +0.0400]" in lines and "1 of 12" in lines and "25.0%" in lines
    assert "HR@10 +0.0100 [+0.0050, +0.0150]" in report.notes[1]
    path = write_result(report, tmp_path, "cpu")
    assert (tmp_path / f"{path.stem}_hr10.svg").exists()
    assert "Not met" in daily_report(result(low=-0.01)).notes[0]
