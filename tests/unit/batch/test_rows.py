"""Rows of items: the same wherever they occur, by core's hash or by the remainder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, item_rows
from tackboard.core.errors import ConfigError

HASHING = HashConfig(num_hashes=3, num_rows=11, seed=4)


@pytest.mark.parametrize("num_rows", [1, 7, 3953, 2**31 - 1])
def test_modulo_is_the_remainder_of_any_id(num_rows: int) -> None:
    """A plain table: ids below its rows have rows of their own; others wrap around, and no row is below 0."""
    extremes = [-(2**63), -(2**63) + 1, 2**63 - 1, -1, -num_rows, num_rows, 0, 5]
    rows = item_rows(np.array(extremes), HashConfig(num_hashes=1, num_rows=num_rows, method="modulo"))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[item % num_rows] for item in extremes]  # Python's remainder is never negative


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hashes": 0},
        {"num_hashes": 65},
        {"num_rows": 0},
        {"num_rows": 2**31},
        {"method": "xor"},
        {"num_hashes": 2, "method": "modulo"},
    ],
)
def test_impossible_hashing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HashConfig(**wrong)
