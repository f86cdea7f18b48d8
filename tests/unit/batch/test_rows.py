"""Rows of items: the same wherever they occur, by core's hash or by the remainder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, can_grow, item_rows
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
    ("before", "factor"), [(1, 7), (16, 4), (1000, 3), (1 << 20, 64), (2**31 - 1, 1), (46_341, 46_340)]
)
def test_larger_hashed_tables_split_rows(before: int, factor: int) -> None:
    """Row r of the larger table serves only ids that row r // factor served: for any ids, seeds and sub-tables."""
    ids = np.random.default_rng(before).integers(-(2**63), 2**63 - 1, 20_000)
    for seed in (0, 4, 77):
        small = HashConfig(num_hashes=3, num_rows=before, seed=seed)
        large = HashConfig(num_hashes=3, num_rows=before * factor, seed=seed)
        assert can_grow(large, before) and can_grow(small, before)
        assert torch.equal(item_rows(ids, large) // factor, item_rows(ids, small))
    assert not can_grow(HashConfig(num_rows=before), before + 1)
    assert before == 1 or not can_grow(HashConfig(num_rows=before - 1), before)


def test_a_larger_plain_table_keeps_the_rows_of_its_ids() -> None:
    small = HashConfig(num_hashes=1, num_rows=50, method="modulo")
    large = HashConfig(num_hashes=1, num_rows=63, method="modulo")
    ids = np.arange(50)
    assert can_grow(large, 50) and not can_grow(small, 63)
    assert torch.equal(item_rows(ids, large), item_rows(ids, small))


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
