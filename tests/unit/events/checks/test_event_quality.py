"""The rules of events that the table of broken snapshots in test_quality.py does not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.events.checks.event_quality import DAY_MS, MAX_HISTORY, EventCheck, day_gaps
from tackboard.events.checks.findings import Finding, Findings
from tackboard.events.checks.table_quality import KnownIds

START_MS = 1_700_000_000_000


def table(**changes: Any) -> pa.Table:
    """Four events of two users."""
    columns: dict[str, Any] = {
        "user": [1, 1, 2, 2],
        "item": [10, 11, 10, 12],
        "action": pa.array(["click"] * 4).dictionary_encode(),
        "surface": pa.array(["home"] * 4).dictionary_encode(),
        "time_ms": [START_MS, START_MS + 1, START_MS, START_MS + 5],
        "received_ms": [START_MS, START_MS + 1, START_MS, START_MS + 5],
        "order": [0, 1, 2, 3],
        "user_id": [1, 1, 2, 2],
        "item_id": [10, 11, 10, 12],
    }
    return pa.table(columns | changes)


def found(*tables: pa.Table, births: list[int] | None = None, max_user_share: float = 0.05) -> dict[str, Finding]:
    """What is said of these row groups, by rule."""
    findings = Findings()
    known = KnownIds(np.array([10, 11, 12]), np.array([1, 2]), None if births is None else np.array(births))
    check = EventCheck(findings, known, now_ms=START_MS + DAY_MS)
    assert check.begin(tables[0].slice(0, 0))
    for one in tables:
        check.look(one)
    check.finish(max_user_share)
    return {finding.rule: finding for finding in findings.sorted()}


def test_a_repeated_event_is_found_within_a_row_group_and_across_two() -> None:
    same = {"time_ms": [START_MS] * 4, "received_ms": [START_MS] * 4}
    twice = table(**same, item=[10, 11, 10, 10], item_id=[10, 11, 10, 10])
    assert found(twice)["duplicate-event"].rows == (3,)
    rows = table(**same, user=[1] * 4, user_id=[1] * 4, item=[10, 11, 12, 10], item_id=[10, 11, 12, 10])
    for cut in (1, 2, 3):
        assert found(rows.slice(0, cut), rows.slice(cut))["duplicate-event"].rows == (3,)
    other_action = pa.array(["click", "click", "click", "save"]).dictionary_encode()
    assert "duplicate-event" not in found(rows.set_column(2, "action", other_action))


def test_actions_are_compared_by_name_not_by_their_number_in_a_row_group() -> None:
    first = table(user=[1] * 4, user_id=[1] * 4, time_ms=[START_MS] * 4, received_ms=[START_MS] * 4, item=[10] * 4,
                  item_id=[10] * 4, action=pa.array(["a", "b", "c", "d"]).dictionary_encode())  # fmt: skip
    second = first.set_column(2, "action", pa.array(["e", "f", "g", "a"]).dictionary_encode())
    second = second.set_column(6, "order", pa.array([4, 5, 6, 7]))
    assert found(first, second)["duplicate-event"].rows == (7,)


def test_time_travel() -> None:
    assert found(table(received_ms=[START_MS] * 4))["received-early"].rows == (1, 3)
    early = found(table(), births=[START_MS + 1, np.iinfo(np.int64).min, START_MS])["before-birth"]
    assert (early.rows, early.severity) == ((0, 2), "warning")


def test_the_order_holds_across_row_groups() -> None:
    rows = table()
    assert found(rows.slice(0, 2), rows.slice(2)) == {}
    assert found(rows.slice(2), rows.slice(0, 2))["not-sorted"].rows == (2,)


def test_positions_and_fields() -> None:
    rows = table(position=pa.array([0, -1, None, 2], pa.int32()), price=[1.0, None, float("nan"), float("inf")])
    assert found(rows)["position-range"].rows == (1,)
    assert found(rows)["not-finite"].rows == (2, 3)


def test_a_heavy_user_and_a_long_history() -> None:
    num_rows = MAX_HISTORY + 1
    heavy = np.ones(num_rows, dtype=np.int64)
    light = np.arange(2, 502)
    users = np.concatenate([heavy, light])
    rows = pa.table({"user_id": users, "time_ms": np.arange(len(users)) + START_MS, "item_id": np.full(len(users), 10)})
    said = found(rows)
    assert said["heavy-user"].wrong == f"one user has {num_rows / len(users):.1%} of the events"
    assert said["long-history"].count == 1
    assert "heavy-user" not in found(rows, max_user_share=1.0)
    # Everybody is heavy among two.
    assert "heavy-user" not in found(table())


@pytest.mark.parametrize(
    ("counts", "gaps"),
    [
        ([50] * 10, []),
        ([50] * 5 + [0] + [50] * 5, [5]),
        ([50] * 5 + [4] + [50] * 5, [5]),
        ([50] * 5 + [5] + [50] * 5, []),
        ([49] * 5 + [0] + [49] * 5, []),
        ([50] * 3 + [0, 0] + [50] * 3, [3, 4]),
        ([50], []),
        ([60] * 20 + [5, 3, 0, 1], []),
        ([2, 1] + [60] * 20, []),
        ([60] * 10 + [0] + [60] * 10 + [5, 0, 1], [10]),
    ],
)
def test_days_that_lack(counts: list[int], gaps: list[int]) -> None:
    days = {19_000 + day: count for day, count in enumerate(counts) if count}
    assert day_gaps(days) == [19_000 + day for day in gaps]


def test_a_gap_is_told_by_its_day() -> None:
    days = [day for day in range(9) if day != 4]
    times = np.concatenate([np.arange(60) + START_MS - 10 * DAY_MS + day * DAY_MS for day in days])
    rows = pa.table({"user_id": np.ones(len(times), dtype=np.int64), "time_ms": times, "order": np.arange(len(times))})
    gap = found(rows)["day-gap"]
    assert gap.text.endswith("1 day has far fewer events than the days around it: 2023-11-08")
