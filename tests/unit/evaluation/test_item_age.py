"""Items fall into slices by their age at the request, and an item without a time falls into none of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.errors import ConfigError, DataError
from tackboard.evaluation.item_age import AGES, DAY_MS, age_slices
from tackboard.events.dataset import Dataset, open_dataset, write_dataset

NOW = 100 * DAY_MS
NAME = pa.array(["click"]).dictionary_encode()


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Items 1 to 4; of item 4 nothing is known but that it was in the log, on day 99."""
    events = pa.table(
        {"user": [1], "item": [4], "action": NAME, "surface": NAME, "time_ms": [99 * DAY_MS]}
        | {"received_ms": [99 * DAY_MS], "order": [0], "request": [1], "position": pa.array([0], pa.int32())}
    )
    born = [NOW - 7 * DAY_MS + 1, NOW - 7 * DAY_MS, NOW - 28 * DAY_MS]
    attributes = {"item": [1, 2, 3], "birth_ms": born, "born": pa.array(born, pa.timestamp("ms")), "kind": list("abc")}
    return open_dataset(write_dataset(tmp_path, "log", events, item_attributes=pa.table(attributes)))


@pytest.mark.parametrize("name", ["birth_ms", "born"])
def test_bounds_belong_to_the_older_slice(dataset: Dataset, name: str) -> None:
    items = np.array([1, 2, 3, 4, 77])
    found = age_slices(dataset, name, items, np.full(5, NOW))
    assert [AGES[place] for place in found] == [AGES[0], AGES[1], AGES[2], AGES[3], AGES[3]]


def test_an_item_of_the_future_is_young(dataset: Dataset) -> None:
    found = age_slices(dataset, "birth_ms", np.array([1, 1, 3]), np.array([0, NOW - 20 * DAY_MS, NOW - DAY_MS]))
    assert [AGES[place] for place in found] == [AGES[0], AGES[0], AGES[1]]


def test_the_first_event_may_stand_in_for_the_birth(dataset: Dataset) -> None:
    found = age_slices(dataset, "first_ms", np.array([4, 4, 1]), np.array([NOW, NOW + 6 * DAY_MS, NOW]))
    assert [AGES[place] for place in found] == [AGES[0], AGES[1], AGES[3]]


def test_a_column_that_is_no_time_is_refused(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="evaluation.item_time = 'birth'.*\n.*birth_ms, born, kind\n.*birth_ms"):
        age_slices(dataset, "birth", np.array([1]), np.array([NOW]))
    with pytest.raises(DataError, match="evaluation.item_time: the column kind of the items is"):
        age_slices(dataset, "kind", np.array([1]), np.array([NOW]))
