"""A rival whose batches are ours, over our own file and over finished segments. Only where the rivals are installed."""

from collections.abc import Callable

import numpy as np
import pytest

from tackboard.bench.loader.arrow import gathered


@pytest.mark.parametrize("variant", ["events", "examples"])
def test_batches_are_ours(loader_differences: Callable[[str, str], list[str]], variant: str) -> None:
    assert loader_differences("arrow", variant) == []


def test_segments_are_gathered_in_the_order_given() -> None:
    users, offsets, columns = gathered(
        np.array([7, 5]), np.array([3, 0]), np.array([2, 3]), {"item": np.array([10, 11, 12, 13, 14])}
    )
    assert users.tolist() == [7, 5]
    assert offsets.tolist() == [0, 2, 5]
    assert columns["item"].tolist() == [13, 14, 10, 11, 12]
