"""Converts item ids to table rows on the device, with the same results as `core.hashing.row_ids` (NumPy).

torch has no unsigned 64-bit arithmetic. So this module uses int64, whose sums and products have the same bits in two's
complement. A logical right shift is done by an arithmetic shift; then the copies of the sign bit are masked off.
"""

from __future__ import annotations

import torch

from tackboard.core.hashing import MULTIPLIER_1, MULTIPLIER_2, seed_offset, table_seed


def row_ids(ids: torch.Tensor, num_hashes: int, num_rows: int, seed: int) -> torch.Tensor:
    """Returns the rows of `ids` (int64 [M]) in `num_hashes` tables of `num_rows` rows: int64 [M, num_hashes]."""
    rows = [
        (_shift_right(mix64(ids, table_seed(seed, table)), 32) * num_rows) >> 32  # the product is below 2^63
        for table in range(num_hashes)
    ]
    return torch.stack(rows, dim=-1)


def mix64(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Computes `core.hashing.mix64`, a bijection, on int64 bit patterns."""
    x = values + _signed(seed_offset(seed))
    x = (x ^ _shift_right(x, 30)) * _signed(MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MULTIPLIER_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
