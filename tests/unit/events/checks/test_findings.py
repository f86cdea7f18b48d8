from __future__ import annotations

import numpy as np

from tackboard.events.checks.findings import ROWS_NAMED, Findings


def test_the_same_rule_at_the_same_place_is_one_finding() -> None:
    findings = Findings()
    findings.add_rows("null", "events.parquet", np.array([3, 4]), "user")
    findings.add_rows("null", "events.parquet", np.arange(100, 110), "user")
    findings.add_rows("null", "events.parquet", np.array([7]), "item")
    findings.add_rows("null", "events.parquet", np.zeros(0, dtype=np.int64), "time_ms")
    user, item = findings.sorted()
    assert (user.count, user.rows, user.wrong) == (12, (3, 4, 100, 101, 102), "rows have no user")
    assert len(user.rows) == ROWS_NAMED
    assert (item.count, item.rows) == (1, (7,))
    assert item.text == "error    events.parquet: 1 row has no item (row 7)"
    assert user.text == "error    events.parquet: 12 rows have no user (row 3, 4, 100, 101, 102)"


def test_errors_come_first() -> None:
    findings = Findings()
    findings.add("heavy-user", "events.parquet", "50.0%")
    findings.add("file-missing", "items.parquet")
    findings.add("long-history", "events.parquet", "16,000", count=3)
    assert [finding.severity for finding in findings.sorted()] == ["error", "warning", "warning"]
    assert [finding.text for finding in findings.sorted()] == [
        "error    items.parquet: the file is missing",
        "warning  events.parquet: one user has 50.0% of the events",
        "warning  events.parquet: 3 users have more than 16,000 events",
    ]
    assert findings.has("file-missing", "items.parquet")
    assert not findings.has("file-missing", "events.parquet")


def test_of_one_thing_the_sentence_is_about_one() -> None:
    findings = Findings()
    for rule in ("not-sorted", "received-early", "before-birth", "unseen-user", "forgotten-user", "long-history"):
        findings.add(rule, "x", "1,000")
    assert [finding.text.partition(": ")[2] for finding in findings.sorted()] == [
        "1 row is not in the order of 1,000",
        "1 row was received before it happened",
        "1 event lies before the birth of its item",
        "1 row names a user that users.parquet does not list",
        "1 user was forgotten but is still in the snapshot",
        "1 user has more than 1,000 events",
    ]
