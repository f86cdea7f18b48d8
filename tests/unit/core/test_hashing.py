"""The reference hash: its golden values are part of every table that was ever stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.core.hashing import MASK_64, MAX_ROWS, mix64, row_ids, seed_offset, string_id

# Changing any value below moves every id to other rows: all stored tables, checkpoints and bundles become noise.
EXTREMES = np.array([0, 1, -1, -(2**63), 2**63 - 1], dtype=np.int64)
GOLDEN_MIX = {
    0: [0x48218226FF3CD4BF, 0xEA8568D2E45FD6CB, 0x9E0160293A33AAF7, 0x42F83292896BFC97, 0x7BE5E381FB2A2EE5],
    7: [0x161EBC4B0828448A, 0x9E0C11B3B7EBC64E, 0x81B2841BB44AFD1E, 0xA948934116F215DC, 0x20D5840F85586474],
}
GOLDEN_ROWS_OF_1000 = [[802, 481, 224], [35, 431, 983], [96, 681, 534], [157, 153, 221], [798, 91, 232]]
GOLDEN_ROWS_OF_MAX = [
    [155064210, 2054218438],
    [151053113, 1419952684],
    [1133568905, 407355555],
    [1855182905, 20684180],
    [1211242647, 1411044611],
]
GOLDEN_STRINGS = {
    "": -5426141060434712860,
    "a": 3405396810240292928,
    "\u00e9": 3394012004367669963,  # é composed
    "e\u0301": 7894974504798537530,  # é decomposed: another string, another id
    "\U0001f642": -5217523031617171271,
}
int64s = st.integers(-(2**63), 2**63 - 1)


def test_golden_values_never_change() -> None:
    for seed, expected in GOLDEN_MIX.items():
        assert [int(value) for value in mix64(EXTREMES, seed)] == expected
    assert row_ids(EXTREMES, 3, 1000, seed=0).tolist() == GOLDEN_ROWS_OF_1000
    assert row_ids(EXTREMES, 2, MAX_ROWS, seed=5).tolist() == GOLDEN_ROWS_OF_MAX


@pytest.mark.parametrize("text", GOLDEN_STRINGS, ids=ascii)
def test_golden_strings_never_change(text: str) -> None:
    assert string_id(text) == GOLDEN_STRINGS[text]


@given(int64s, st.integers(0, 2**40))
@settings(max_examples=60)
def test_mix_equals_plain_integer_arithmetic(value: int, seed: int) -> None:
    """The same bijection in Python integers, where nothing wraps by itself."""
    x = ((value & MASK_64) + seed_offset(seed)) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    x ^= x >> 31
    assert int(mix64(np.array([value], dtype=np.int64), seed)[0]) == x == int(mix64(value, seed)[0])


@given(st.lists(int64s, max_size=20), st.integers(1, 5), st.integers(1, MAX_ROWS), st.integers(0, 1000))
@settings(max_examples=60)
def test_rows_lie_in_range(ids: list[int], num_hashes: int, num_rows: int, seed: int) -> None:
    rows = row_ids(np.array(ids, dtype=np.int64), num_hashes, num_rows, seed)
    assert rows.shape == (len(ids), num_hashes)
    assert rows.dtype == np.int64
    assert ((rows >= 0) & (rows < num_rows)).all()


@pytest.mark.parametrize("num_rows", [0, -1, MAX_ROWS + 1])
def test_impossible_tables_are_refused(num_rows: int) -> None:
    with pytest.raises(DataError, match=str(num_rows)):
        row_ids(EXTREMES, 1, num_rows, seed=0)


def test_adjacent_ids_spread_evenly_and_tables_are_unrelated() -> None:
    num_ids, num_rows = 50_000, 100
    rows = row_ids(np.arange(num_ids), 2, num_rows, seed=3)
    expected = num_ids / num_rows
    for table in rows.T:
        chi_square = ((np.bincount(table, minlength=num_rows) - expected) ** 2 / expected).sum()
        assert chi_square < 160  # 99 degrees of freedom: 149 is exceeded once in a thousand
    collisions = (rows[:, 0] == rows[:, 1]).mean()
    assert abs(collisions - 1 / num_rows) < 0.003
    assert (row_ids(np.arange(num_ids), 1, num_rows, seed=4)[:, 0] == rows[:, 0]).mean() < 0.02


def test_one_value_mixes_as_among_others() -> None:
    values = np.array([0, 1, -1, 2**63 - 1, -(2**63)])
    for seed in (0, 1, 65537):
        alone = [mix64(values[row : row + 1], seed) for row in range(len(values))]
        assert np.concatenate(alone).tolist() == mix64(values, seed).tolist()
        assert alone[0].dtype == np.uint64
