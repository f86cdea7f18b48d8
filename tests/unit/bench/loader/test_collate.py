"""Cutting shuffled windows into steps: full steps, and what is left of a window goes on in the next."""

from typing import Any, cast

import numpy as np

from tackboard.bench.loader.collate import Collate, Steps
from tackboard.bench.loader.data import EXAMPLE_COLUMNS


def made(users: Any, offsets: Any, columns: Any) -> Any:
    """In place of a batch: its users and the items of each of its segments."""
    return users.tolist(), [part.tolist() for part in np.split(columns["item"], offsets[1:-1])]


def window(first: int, lengths: list[int]) -> tuple[Any, Any, dict[str, Any]]:
    offsets = np.append(0, np.cumsum(lengths))
    values = np.arange(first * 100, first * 100 + offsets[-1])
    return np.arange(first, first + len(lengths)), offsets, dict.fromkeys(EXAMPLE_COLUMNS, values)


def test_what_is_left_goes_on_in_the_next_window() -> None:
    steps = Steps(cast(Collate, made), 4)
    assert list(steps.add(*window(1, [2, 2, 3]), last=False)) == [([1, 2], [[100, 101], [102, 103]])]
    assert list(steps.add(*window(7, [1, 4, 2]), last=True)) == [
        ([3, 7], [[104, 105, 106], [700]]),
        ([8], [[701, 702, 703, 704]]),
        ([9], [[705, 706]]),
    ]


def test_a_rest_that_nothing_fits_to_is_a_step_of_its_own() -> None:
    steps = Steps(cast(Collate, made), 4)
    assert list(steps.add(*window(1, [3]), last=False)) == []
    assert list(steps.add(*window(2, [3]), last=True)) == [([1], [[100, 101, 102]]), ([2], [[200, 201, 202]])]
