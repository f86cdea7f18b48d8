"""Distances against values computed by hand, and what must hold of any two lists of shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.events.checks.drift import jensen_shannon, l_infinity, measure_drift
from tackboard.events.checks.measures import Slice, parse_range
from tackboard.events.dataset import open_dataset

START_MS = 1_700_000_000_000
DAY_MS = 86_400_000
counts = st.lists(st.integers(0, 50), min_size=5, max_size=5).filter(any)


def shares(values: list[int]) -> np.ndarray:
    return np.array(values) / sum(values)


def test_values_computed_by_hand() -> None:
    # p = (1/2, 1/2), q = (1, 0), m = (3/4, 1/4).
    # JS = 1/2 (1/2 log2(2/3) + 1/2 log2 2) + 1/2 log2(4/3) = 1/2 (-0.2924812504 + 0.5) + 0.2075187496
    assert jensen_shannon(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(0.3112781245, abs=1e-10)
    assert l_infinity(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0.5
    # p = (3/4, 1/4), q = (1/4, 3/4), m = (1/2, 1/2): JS = 3/4 log2(3/2) - 1/4 = 1 - H(1/4)
    assert jensen_shannon(np.array([0.75, 0.25]), np.array([0.25, 0.75])) == pytest.approx(0.1887218755, abs=1e-10)
    assert jensen_shannon(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0
    assert l_infinity(np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.25, 0.35])) == pytest.approx(0.2)


@given(counts, counts)
def test_what_holds_of_any_two(first: list[int], second: list[int]) -> None:
    old, new = shares(first), shares(second)
    assert jensen_shannon(old, new) == pytest.approx(jensen_shannon(new, old), abs=1e-12)
    assert 0.0 <= jensen_shannon(old, new) <= 1.0
    assert 0.0 <= l_infinity(old, new) <= 1.0
    assert jensen_shannon(old, old) == l_infinity(old, old) == 0.0
    # The square of total variation bounds it from below, total variation itself from above (in bits).
    variation = 0.5 * float(np.abs(old - new).sum())
    assert jensen_shannon(old, new) <= variation + 1e-12
    assert l_infinity(old, new) <= variation + 1e-12


def events(num_events: int = 60, *, action: str = "click", step_ms: int = 1000, day: int = 0) -> list[Any]:
    return [
        (number % 6, number % 5, action if number % 3 else "view", "home", START_MS + day * DAY_MS + number * step_ms)
        for number in range(num_events)
    ]


def measured(make_dataset: Callable[..., Path], folder: Path, old: Any, new: Any) -> dict[str, Any]:
    slices = []
    for name, (rows, options) in (("old", old), ("new", new)):
        slices.append(Slice(open_dataset(make_dataset(folder, rows, name, **options))))
    drift = measure_drift(*slices)
    assert [one.jensen_shannon_bits for one in drift.distances] == sorted(
        (one.jensen_shannon_bits for one in drift.distances), reverse=True
    )
    return {one.column: one for one in drift.distances} | {"drift": drift}


def test_each_change_shows_in_its_column(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    old = (events(), {"fields": {"price": [float(n % 10) for n in range(60)], "country": ["de"] * 60, "a": [1] * 60}})
    new = (
        events(action="save", step_ms=60_000),
        {
            "fields": {"price": [100.0] * 20 + [None] * 40, "country": ["de", "fr"] * 30, "b": [1] * 60},
            "received_ms": [time + 5000 for *_, time in events(step_ms=60_000)],
        },
    )
    found = measured(make_dataset, tmp_path, old, new)
    action = found["action"]
    assert (action.kind, action.l_infinity) == ("names", pytest.approx(2 / 3))
    assert (action.moved, action.old_share, action.new_share) in (
        ("click", pytest.approx(2 / 3), 0.0),
        ("(other)", 0.0, pytest.approx(2 / 3)),
    )
    # The shares of click and of everything new: (2/3, 1/3, 0) against (0, 1/3, 2/3).
    assert action.jensen_shannon_bits == pytest.approx(2 / 3)
    assert found["country"].l_infinity == pytest.approx(0.5)
    # Nobody was late before, everybody is five seconds late now.
    assert found["lateness_s"].jensen_shannon_bits == pytest.approx(1.0)
    assert found["gap_s"].jensen_shannon_bits == pytest.approx(1.0)
    assert found["price"].moved == "(missing)" and found["price"].new_share == pytest.approx(2 / 3)
    assert found["item"].jensen_shannon_bits == found["events_per_user"].jensen_shannon_bits == 0.0
    assert (found["drift"].only_old, found["drift"].only_new) == (["a"], ["b"])


def test_two_ranges_of_one_dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(tmp_path, events() + events(30, action="save", day=2)))
    day = str(np.datetime64(START_MS // DAY_MS, "D"))
    following = str(np.datetime64(START_MS // DAY_MS + 1, "D"))
    drift = measure_drift(Slice(dataset, *parse_range(f"..{day}")), Slice(dataset, *parse_range(f"{following}..")))
    assert (drift.num_old, drift.num_new) == (60, 30)
    assert next(one for one in drift.distances if one.column == "action").l_infinity == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="no event in this range"):
        measure_drift(Slice(dataset, *parse_range("..2001-01-01")), Slice(dataset))


def test_a_field_of_another_type_is_not_compared(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    old = (events(), {"fields": {"price": [1] * 60}})
    new = (events(), {"fields": {"price": ["cheap"] * 60}})
    found = measured(make_dataset, tmp_path, old, new)
    assert "price" not in found
    assert (found["drift"].only_old, found["drift"].only_new) == (["price"], ["price"])
