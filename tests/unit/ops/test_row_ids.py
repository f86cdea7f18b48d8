"""The torch twin of the hash equals the NumPy reference bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core import hashing
from tackboard.ops import row_ids as twin

EXTREMES = [0, 1, -1, 2, -(2**63), -(2**63) + 1, 2**63 - 1, 2**32, -(2**32)]
int64s = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(EXTREMES))


@given(st.lists(int64s, max_size=40), st.integers(-5, 2**40))
@settings(max_examples=80)
def test_mix_equals_the_reference(values: list[int], seed: int) -> None:
    ids = np.array(values, dtype=np.int64)
    assert np.array_equal(twin.mix64(torch.from_numpy(ids), seed).numpy().view(np.uint64), hashing.mix64(ids, seed))


@given(
    st.lists(int64s, max_size=40),
    st.integers(1, 8),
    st.one_of(st.integers(1, 5000), st.sampled_from([1, 2**20, hashing.MAX_ROWS])),
    st.integers(0, 2**30),
)
@settings(max_examples=80)
def test_rows_equal_the_reference(values: list[int], num_hashes: int, num_rows: int, seed: int) -> None:
    ids = np.array(values, dtype=np.int64)
    rows = twin.row_ids(torch.from_numpy(ids), num_hashes, num_rows, seed)
    assert rows.dtype == torch.int64
    assert np.array_equal(rows.numpy(), hashing.row_ids(ids, num_hashes, num_rows, seed))
