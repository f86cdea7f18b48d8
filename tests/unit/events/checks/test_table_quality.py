"""Requests and the comparisons that all tables share; test_quality.py has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.events.checks.findings import Finding, Findings
from tackboard.events.checks.table_quality import EntityCheck, KnownIds, RequestCheck

START_MS = 1_700_000_000_000


def requests(**changes: Any) -> pa.Table:
    columns: dict[str, Any] = {
        "request": [1, 2, 3],
        "user_id": [1, 1, 2],
        "time_ms": [START_MS, START_MS + 1, START_MS],
        "item_id": pa.array([[10, 11], [10], [11]], pa.list_(pa.int64())),
        "position": pa.array([[0, 1], [0], [0]], pa.list_(pa.int32())),
        "weight": pa.array([[1.0, 1.0], [1.0], [2.0]], pa.list_(pa.float32())),
        "label_save": pa.array([[1, 0], [None], [0]], pa.list_(pa.int8())),
    }
    return pa.table(columns | changes)


def found(table: pa.Table) -> dict[str, Finding]:
    findings = Findings()
    known = KnownIds(np.array([10, 11]), np.array([1, 2]), None)
    check = RequestCheck(known, findings, now_ms=START_MS)
    if check.begin(table.slice(0, 0)):
        check.look(table.slice(0, 1))
        check.look(table.slice(1))
    return {finding.rule: finding for finding in findings.sorted()}


def test_nothing_is_wrong_with_requests() -> None:
    assert found(requests()) == {}


@pytest.mark.parametrize(
    ("changes", "rule", "row"),
    [
        ({"item_id": pa.array([[10, 11], [12], [11]], pa.list_(pa.int64()))}, "unknown-item", 1),
        ({"user_id": [1, 1, 9]}, "unseen-user", 2),
        ({"user_id": [2, 1, 2]}, "not-sorted", 1),
        ({"time_ms": [START_MS + 2, START_MS + 1, START_MS]}, "not-sorted", 1),
        ({"time_ms": [START_MS, START_MS + 1, 1_700_000_000]}, "time-range", 2),
        ({"position": pa.array([[0, 1], [-1], [0]], pa.list_(pa.int32()))}, "position-range", 1),
        ({"weight": pa.array([[1.0, 1.0], [1.0], [float("nan")]], pa.list_(pa.float32()))}, "not-finite", 2),
        ({"label_save": pa.array([[1, 0], [2], [0]], pa.list_(pa.int8()))}, "label-value", 1),
        ({"label_save": pa.array([[1, 0], [1, 0], [0]], pa.list_(pa.int8()))}, "list-lengths", 1),
    ],
)
def test_what_is_wrong_with_requests_is_found(changes: dict[str, Any], rule: str, row: int) -> None:
    assert found(requests(**changes))[rule].rows == (row,)


def test_requests_without_their_columns() -> None:
    assert found(requests().drop_columns(["user_id"]))["column-missing"].wrong == "lacks the column user_id"
    assert "item_id is int64" in found(requests(item_id=[1, 2, 3]))["column-type"].wrong


def test_ids_of_two_row_groups_must_rise() -> None:
    findings = Findings()
    check = EntityCheck("item", findings)
    part = pa.table({"item_id": [1, 2], "num_events": [1, 1]})
    check.begin(part.slice(0, 0))
    check.look(part)
    check.look(pa.table({"item_id": [2, 3], "num_events": [1, 1]}))
    check.look(pa.table({"item_id": [0], "num_events": [1]}))
    assert {one.rule: one.rows for one in findings.sorted()} == {"duplicate-id": (2,), "not-sorted": (4,)}
    assert check.ids() is None, "not before all of it was read"
