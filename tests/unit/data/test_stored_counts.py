"""Counts that are made once per snapshot and settings; test_index.py has what damages an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tackboard.data.stored_counts import StoredCounts, counted_once, index_place
from tackboard.events.dataset import open_dataset


def test_counts_are_made_once_for_the_same_settings(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    dataset = open_dataset(make_dataset(tmp_path, [(1, 2, "click", "home", 3), (1, 3, "click", "home", 4)]))
    made = []

    def count() -> StoredCounts:
        made.append(1)
        return StoredCounts({"numbers": np.array([5, 7])}, {"total": 12})

    def get(settings: dict[str, int], *, fits: bool = True) -> StoredCounts:
        return counted_once(dataset, settings, count, lambda found: fits and found.figures["total"] == 12)

    for _ in range(2):
        found = get({"length": 1})
        assert (found.arrays["numbers"].tolist(), found.figures["total"]) == ([5, 7], 12)
    assert len(made) == 1
    get({"length": 2})
    get({"length": 1}, fits=False)
    assert len(made) == 3
    places = {index_place(dataset, {"length": length}) for length in (1, 2)}
    assert len(places) == 2 and all(place is not None and place.is_dir() for place in places)
