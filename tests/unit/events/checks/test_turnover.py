"""Measures of a log's catalogue: what the streamed pass finds is what a plain loop over the events finds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import CorruptFileError
from tackboard.core.keyed_random import uniform
from tackboard.events.checks import turnover as turnover_module
from tackboard.events.checks.measures import DAY_MS, HOUR_MS
from tackboard.events.checks.turnover import LAST_SHARE, NUM_BINS, Turnover, measure_turnover
from tackboard.events.dataset import Dataset, open_dataset

Row = tuple[Any, Any, str, str, int]
Make = Callable[..., Path]


def log_of(num_users: int, num_events: int, lifetime_h: float, seed: int = 3) -> list[Row]:
    """A log in which every hour brings an item that is used for `lifetime_h` hours."""
    draws = uniform(seed, np.arange(num_events * 3)).reshape(num_events, 3)
    rows = []
    for number, draw in enumerate(draws):
        hours = 240.0 * number / num_events
        item = int(max(0.0, hours - lifetime_h * draw[1] ** 2))
        rows.append((f"user {int(draw[0] * num_users)}", f"item {item}", "click", "home", round(hours * HOUR_MS)))
    return rows


def by_plain_loop(rows: Sequence[Row], first_ms: int, last_ms: int) -> dict[str, Any]:
    """The same measures, without any trick. `rows` is the log in order of time."""
    births: dict[Any, int] = {}
    of_user: dict[Any, list[Any]] = {}
    per_item: dict[Any, list[int]] = {}
    ages, num_repeats, num_immediate = [], 0, 0
    for user, item, _, _, time in rows:
        age = time - births.setdefault(item, time)
        ages.append(age)
        per_item.setdefault(item, []).append(age)
        seen = of_user.setdefault(user, [])
        num_repeats += item in seen
        num_immediate += bool(seen) and seen[-1] == item
        seen.append(item)
    width = (last_ms - first_ms) // NUM_BINS + 1
    edge = max(
        edge
        for edge in (first_ms + (time - first_ms) // width * width for *_, time in rows)
        if sum(time >= edge for *_, time in rows) >= LAST_SHARE * len(rows)
    )
    last = [(row, age) for row, age in zip(rows, ages, strict=True) if row[4] >= edge]
    halves = [sorted(found)[(len(found) - 1) // 2] for found in per_item.values() if len(found) >= 10]
    users_last = {row[0] for row, _ in last}
    share = len(last) / len(rows)
    return {
        "num_events": len(rows),
        "num_users": len(of_user),
        "num_items": len(births),
        "span_ms": last_ms - first_ms,
        "num_repeats": num_repeats,
        "num_immediate_repeats": num_immediate,
        "median_age_ms": int(statistics.median(ages)),
        "half_life_ms": int(statistics.median(halves)) if halves else None,
        "before_ms": edge - first_ms,
        "num_last": len(last),
        "num_last_new": sum(births[row[1]] >= edge for row, _ in last),
        "num_last_by_chance": round(sum(len(found) * share ** len(found) for found in per_item.values())),
        "num_last_under_hour": sum(age < HOUR_MS for _, age in last),
        "num_last_under_day": sum(age < DAY_MS for _, age in last),
        "num_last_under_week": sum(age < 7 * DAY_MS for _, age in last),
        "num_users_last": len(users_last),
        "num_users_across": len(users_last & {row[0] for row in rows if row[4] < edge}),
    }


def measured(folder: Path) -> dict[str, Any]:
    found = measure_turnover(open_dataset(folder))
    return {name: getattr(found, name) for name in Turnover.__dataclass_fields__}


@pytest.mark.parametrize("lifetime_h", [0.5, 30.0, 240.0])
def test_measures_are_those_of_a_plain_loop(
    lifetime_h: float, tmp_path: Path, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 90)
    rows = log_of(20, 900, lifetime_h)
    folder = make_dataset(tmp_path, rows)
    assert open_dataset(folder).layout.num_buckets > 5
    assert measured(folder) == by_plain_loop(rows, rows[0][4], rows[-1][4])


def test_items_without_events_count_for_nothing(tmp_path: Path, make_dataset: Make) -> None:
    import pyarrow as pa

    rows = log_of(20, 200, 30.0)
    listed = pa.table({"item": pa.array(["item 0", "vase"]), "price": pa.array([1.0, 2.0])})
    found = measured(make_dataset(tmp_path, rows, item_attributes=listed))
    assert found == by_plain_loop(rows, rows[0][4], rows[-1][4])


@pytest.mark.parametrize(
    "rows",
    [
        [("ann", "lamp", "click", "home", 5)],
        [("ann", f"item {number}", "click", "home", 5) for number in range(30)],
        [(f"user {number}", "lamp", "click", "home", 5) for number in range(30)],
        [("ann", "lamp", "click", "home", 1000 * number) for number in range(30)],
        [("ann", "lamp", "click", "home", 0), *(("bob", "sofa", "click", "home", 10**12 + n) for n in range(30))],
    ],
    ids=["one event", "one instant", "one item at one instant", "one user and item", "one event long before"],
)
def test_odd_logs_have_defined_measures(rows: list[Row], tmp_path: Path, make_dataset: Make) -> None:
    found = measured(make_dataset(tmp_path, rows))
    assert found == by_plain_loop(rows, rows[0][4], rows[-1][4])
    assert 0 < found["num_last"] <= found["num_events"]


def test_shares_and_ages_that_the_log_cannot_know() -> None:
    zero = dict.fromkeys(Turnover.__dataclass_fields__, 0)
    found = Turnover(**zero | {"num_events": 100, "num_repeats": 25, "num_last": 10, "num_last_new": 4})
    assert (found.repeat_share, found.new_share, found.chance_share) == (0.25, 0.4, 0.0)
    assert found.younger_share(DAY_MS) is None
    counts = {"num_last_under_hour": 1, "num_last_under_day": 5, "num_last_under_week": 9}
    found = Turnover(**zero | {"num_last": 10, "before_ms": DAY_MS} | counts)
    assert [found.younger_share(age) for age in turnover_module.HORIZONS_MS] == [0.1, 0.5, None]
    nothing = Turnover(**zero)
    assert (nothing.repeat_share, nothing.new_share, nothing.younger_share(HOUR_MS)) == (0.0, 0.0, None)


def test_a_sample_of_the_items_is_measured_if_there_are_too_many_events(
    tmp_path: Path, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every item has its events 0, 1, 2, … hours after its first event, so each sample has the same half."""
    rows = [("ann", item, "click", "home", (item + hour) * HOUR_MS) for item in range(40) for hour in range(11)]
    folder = make_dataset(tmp_path, sorted(rows, key=lambda row: row[4]))
    monkeypatch.setattr(turnover_module, "MAX_SAMPLED_EVENTS", 25)
    assert measured(folder)["half_life_ms"] == 5 * HOUR_MS
    monkeypatch.setattr(turnover_module, "MAX_SAMPLED_EVENTS", 10)
    assert measured(folder)["half_life_ms"] is None


def test_an_event_of_an_unlisted_item_is_a_corrupt_dataset(
    tmp_path: Path, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(make_dataset(tmp_path, log_of(5, 50, 10.0)))
    items = dataset.read_items(["item_id", "num_events", "first_ms"])
    monkeypatch.setattr(Dataset, "read_items", lambda *_: items.slice(0, items.num_rows - 1))
    with pytest.raises(CorruptFileError, match="lacks items"):
        measure_turnover(dataset)
