"""Hand-written rivals of the loader: their batches are ours, and windows are cut into full steps."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rivals.loader_batches import Collate, batches, gathered
from tackboard.bench.loader.data import EXAMPLE_COLUMNS

VARIANTS = [
    ("arrow", "events"), ("arrow", "examples"), ("hugging_face", "arrow"), ("hugging_face", "torch"),
    # Starting Ray takes its time.
    pytest.param("ray", "window", marks=pytest.mark.slow), pytest.param("ray", "local", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("module", "variant"), VARIANTS)
def test_batches_are_ours(loader_differences: Callable[[str, str], list[str]], module: str, variant: str) -> None:
    """Only where the rivals are installed."""
    assert loader_differences(module, variant) == []


def test_segments_are_gathered_in_the_order_given() -> None:
    users, offsets, columns = gathered(
        np.array([7, 5]), np.array([3, 0]), np.array([2, 3]), {"item": np.array([10, 11, 12, 13, 14])}
    )
    assert users.tolist() == [7, 5]
    assert offsets.tolist() == [0, 2, 5]
    assert columns["item"].tolist() == [13, 14, 10, 11, 12]


def made(users: Any, offsets: Any, columns: Any) -> Any:
    """In place of a batch: its users and the items of each of its segments."""
    return users.tolist(), [part.tolist() for part in np.split(columns["item"], offsets[1:-1])]


def window(first: int, lengths: list[int]) -> tuple[Any, Any, dict[str, Any]]:
    offsets = np.append(0, np.cumsum(lengths))
    values = np.arange(first * 100, first * 100 + offsets[-1])
    return np.arange(first, first + len(lengths)), offsets, dict.fromkeys(EXAMPLE_COLUMNS, values)


def test_what_is_left_goes_on_in_the_next_window() -> None:
    assert list(batches(cast(Collate, made), 4, iter([window(1, [2, 2, 3]), window(7, [1, 4, 2])]))) == [
        ([1, 2], [[100, 101], [102, 103]]),
        ([3, 7], [[104, 105, 106], [700]]),
        ([8], [[701, 702, 703, 704]]),
        ([9], [[705, 706]]),
    ]


def test_a_rest_that_nothing_fits_to_is_a_step_of_its_own() -> None:
    assert list(batches(cast(Collate, made), 4, iter([window(1, [3]), window(2, [3])]))) == [
        ([1], [[100, 101, 102]]),
        ([2], [[200, 201, 202]]),
    ]
