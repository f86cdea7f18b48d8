"""Hand-written rivals of the features: their list is ours, what they share is right, and their values are ours."""

from collections.abc import Callable

import numpy as np
import pytest

from rivals.feature_list import (
    REQUEST_FEATURES,
    ROW_FEATURES,
    cosines,
    cross_ids,
    dots,
    item_buckets,
    known_brand_id,
    known_sale,
    known_string_id,
    squares,
)
from tackboard.bench.features.run import RIVALS
from tackboard.bench.features.set import features
from tackboard.core.hashing import mix64, row_ids, string_id


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in RIVALS.items() for name in names])
def test_values_are_ours(same_as_ours: Callable[[str, str], None], part: str, name: str) -> None:
    """Only where the rivals are installed."""
    same_as_ours(name, part)


def test_the_list_is_that_of_the_feature_set() -> None:
    levels = {feature.name: feature.level for feature in features.features()}
    assert {name for name, level in levels.items() if level == "candidate"} == set(ROW_FEATURES)
    assert {name for name, level in levels.items() if level != "candidate"} == set(REQUEST_FEATURES)


def test_ids_are_those_of_the_project() -> None:
    assert known_string_id("shoes") == string_id("shoes")
    assert known_brand_id(" CAFE\u0301\t") == string_id("caf\u00e9")
    ids = np.array([1, -5, 2**62], dtype=np.int64)
    assert item_buckets(ids).tolist() == row_ids(ids, 1, 100_000, 0)[:, 0].tolist()
    expected = mix64(mix64(ids, 0) ^ np.uint64(7), 0).view(np.int64)
    assert cross_ids(ids, 7).tolist() == expected.tolist()
    assert cross_ids(ids[1], 7).tolist() == expected[1:2].tolist()


def test_a_sale_is_found_whatever_its_case() -> None:
    assert known_sale("Lamp on SALE") and not known_sale("Lamp")


def test_cosines() -> None:
    left = np.array([[1.0, 0.0], [0.0, 0.0], [3.0, 4.0]], dtype=np.float32)
    right = np.array([[2.0, 0.0], [1.0, 1.0], [-3.0, -4.0]], dtype=np.float32)
    assert cosines(dots(left, right), squares(left), squares(right)).tolist() == [1.0, 0.0, -1.0]
    assert dots(right[:1], right).tolist() == [4.0, 2.0, -6.0]
