"""Stored counts: made once for the same settings, and again if they are damaged, do not fit, or cannot be stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.data import stored_counts
from tackboard.data.stored_counts import IndexCounts, counted_once, index_place
from tackboard.events.dataset import Dataset, open_dataset

SETTINGS = {"kind": "test", "length": 3}


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Dataset:
    return open_dataset(make_dataset(tmp_path, [(1, 5, "click", "home", 1), (2, 6, "click", "home", 2)]))


class Counter:
    """Counts how often it was asked, and answers with this number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> IndexCounts:
        self.calls += 1
        return IndexCounts(
            {"items": np.array([self.calls, 1 << 40]), "none": np.zeros(0, np.int64)}, {"calls": self.calls}
        )


def place_of(dataset: Dataset) -> Path:
    place = index_place(dataset, SETTINGS)
    assert place is not None
    return place


def test_the_second_time_they_are_read(dataset: Dataset) -> None:
    count = Counter()
    made, read = (counted_once(dataset, SETTINGS, count, lambda _found: True) for _ in range(2))
    assert count.calls == 1
    for found in (made, read):
        assert {name: array.tolist() for name, array in found.arrays.items()} == {"items": [1, 1 << 40], "none": []}
        assert found.figures["calls"] == 1
    assert sorted(path.name for path in place_of(dataset).iterdir()) == ["MANIFEST.json", "items", "none"]


def test_other_settings_files_and_versions_have_counts_of_their_own(
    dataset: Dataset, tmp_path: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_dataset(make_dataset(tmp_path / "other", [(1, 5, "click", "home", 9)]))
    places = [
        place_of(dataset),
        index_place(dataset, SETTINGS | {"length": 4}),
        index_place(dataset, {}),
        place_of(other),
    ]
    monkeypatch.setattr(stored_counts, "VERSION", stored_counts.VERSION + 1)
    places.append(place_of(dataset))
    assert len({place.name for place in places if place is not None}) == 5
    assert index_place(dataset, dict(reversed(SETTINGS.items()))) == places[-1]  # The order says nothing.


@pytest.mark.parametrize("name", ["items", "MANIFEST.json"])
def test_damaged_counts_are_made_again(dataset: Dataset, name: str) -> None:
    count = Counter()
    counted_once(dataset, SETTINGS, count, lambda _found: True)
    damaged = place_of(dataset) / name
    data = bytearray(damaged.read_bytes())
    data[3] ^= 1
    damaged.write_bytes(data)
    assert counted_once(dataset, SETTINGS, count, lambda _found: True).figures["calls"] == 2
    assert counted_once(dataset, SETTINGS, count, lambda _found: True).figures["calls"] == 2


def test_counts_that_do_not_fit_are_made_again(dataset: Dataset) -> None:
    count = Counter()
    for calls in (1, 2, 3):
        assert counted_once(dataset, SETTINGS, count, lambda _found: False).figures["calls"] == calls
    assert counted_once(dataset, SETTINGS, count, lambda found: found.figures["calls"] == 3).figures["calls"] == 3


def test_without_a_folder_for_them_nothing_is_stored(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_counts, "index_folder", lambda _snapshot: None)
    count = Counter()
    assert [counted_once(dataset, SETTINGS, count, lambda _found: True).figures["calls"] for _ in range(2)] == [1, 2]
