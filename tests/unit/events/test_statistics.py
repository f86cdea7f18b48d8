from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tackboard.events.attributes import entity_table
from tackboard.events.statistics import describe

MINUTE = 60_000


def table(rows: list[tuple[int, int, int]]) -> pa.Table:
    """(user, item, minute) rows, already sorted."""
    users, items, minutes = zip(*rows, strict=True)
    count = len(rows)
    return pa.table(
        {
            "user": pa.array(users, pa.int64()),
            "item": pa.array(items, pa.int64()),
            "user_id": pa.array(users, pa.int64()),
            "item_id": pa.array(items, pa.int64()),
            "action": pa.array(["click"] * (count - 1) + ["save"]).dictionary_encode(),
            "surface": pa.array(["home"] * count).dictionary_encode(),
            "time_ms": pa.array([MINUTE * minute for minute in minutes], pa.int64()),
        }
    )


def statistics_of(rows: list[tuple[int, int, int]]) -> dict:
    events = table(rows)
    return describe(events, entity_table(events, "item"))


def test_counts_repeats_sessions_and_gaps_of_a_log_done_by_hand() -> None:
    found = statistics_of([(1, 5, 1), (1, 5, 2), (1, 6, 62), (1, 5, 63), (2, 5, 10)])
    assert (found["num_events"], found["num_users"], found["num_items"]) == (5, 2, 2)
    assert found["events_per_user"]["mean"] == 2.5
    assert found["repeats"] == {"share": pytest.approx(2 / 5), "immediate_share": pytest.approx(1 / 5)}
    assert found["sessions"] == {"count": 3, "per_user": 1.5, "events_per_session": pytest.approx(5 / 3)}
    assert found["gaps_s"]["q50"] == 60.0
    assert found["actions"] == {"click": 0.8, "save": 0.2}
    assert (found["first_ms"], found["last_ms"]) == (MINUTE, 63 * MINUTE)


def test_concentration_of_even_and_uneven_popularity() -> None:
    even = statistics_of([(1, item, item) for item in range(1, 11)])["popularity"]
    assert even["gini"] == pytest.approx(0.0)
    assert even["top_10_percent_share"] == pytest.approx(0.1)
    uneven = statistics_of([(1, max(1, item - 89), item) for item in range(1, 100)])["popularity"]
    assert uneven["gini"] > 0.7
    assert uneven["top_10_percent_share"] > 0.9


def test_the_fitted_exponent_is_the_one_that_made_the_counts() -> None:
    counts = np.round(10_000 * np.arange(1.0, 101.0) ** -0.8).astype(int)
    items = np.repeat(np.arange(100), counts)
    found = statistics_of([(1, int(item), i + 1) for i, item in enumerate(items)])
    assert found["popularity"]["zipf_exponent_of_head"] == pytest.approx(0.8, abs=0.01)


def test_births_are_shares_of_the_span_and_prefer_what_the_items_file_says() -> None:
    events = table([(1, 5, 1), (1, 6, 101)])
    items = entity_table(events, "item")
    assert describe(events, items)["item_births"]["mean"] == pytest.approx(0.5)
    born = items.append_column("birth_ms", pa.array([MINUTE, 26 * MINUTE]))
    assert describe(events, born)["item_births"]["q100"] == pytest.approx(0.25)


def test_one_event_is_enough() -> None:
    found = statistics_of([(1, 5, 1)])
    assert found["gaps_s"] == {}
    assert found["popularity"]["top_1_percent_share"] == 1.0


def test_fields_are_listed_with_their_type_and_how_many_are_missing() -> None:
    events = table([(1, 5, 1), (1, 6, 2)])
    assert describe(events, entity_table(events, "item"))["fields"] == {}
    events = events.append_column("dwell", pa.array([1, None])).append_column("ok", pa.array([True, False]))
    assert describe(events, entity_table(events, "item"))["fields"] == {
        "dwell": {"type": "int", "num_missing": 1},
        "ok": {"type": "bool", "num_missing": 0},
    }


def test_repeats_do_not_depend_on_how_far_apart_ids_lie() -> None:
    near = statistics_of([(1, 5, 1), (1, 5, 2), (1, 6, 62), (1, 5, 63), (2, 5, 10)])
    low, high = -(1 << 62), (1 << 62) + 1
    far = statistics_of([(1, low, 1), (1, low, 2), (1, high, 62), (1, low, 63), (2, low, 10)])
    assert far["repeats"] == near["repeats"]
