"""Converts item ids to rows of embedding tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core.config import check
from tackboard.core.hashing import MAX_ROWS, row_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashConfig:
    """The settings of the conversion from an item id to table rows."""

    num_hashes: int = 4
    """Number of hash functions and of sub-tables. An item's vector concatenates one row of each sub-table."""
    num_rows: int = 4096
    """Number of rows of each sub-table."""
    seed: int = 0
    """Seed that chooses the hash functions; it is part of the model."""
    method: str = "mix"
    """`mix` hashes ids. `modulo` takes id mod num_rows, so each id from 0 to num_rows - 1 has its own row."""

    def __post_init__(self) -> None:
        check(1 <= self.num_hashes <= 64, "model.tables.num_hashes", self.num_hashes, "1 to 64")
        check(1 <= self.num_rows <= MAX_ROWS, "model.tables.num_rows", self.num_rows, f"1 to {MAX_ROWS}")
        check(self.method in ("mix", "modulo"), "model.tables.method", self.method, "mix, modulo")
        is_distinct = self.method == "mix" or self.num_hashes == 1
        allowed = "1 with method modulo: every further table would repeat the first"
        check(is_distinct, "model.tables.num_hashes", self.num_hashes, allowed)


def can_grow(hashing: HashConfig, num_rows_before: int) -> bool:
    """Returns whether tables of `hashing` can take over the rows of tables with `num_rows_before` rows, item by item.

    With `mix` and f times as many rows, row r serves only ids that row r // f served before. With `modulo`, ids from 0
    to num_rows_before - 1 keep their rows.
    """
    if hashing.method == "modulo":
        return hashing.num_rows >= num_rows_before
    return hashing.num_rows % num_rows_before == 0


def item_rows(item_ids: NDArray[np.int64], hashing: HashConfig) -> torch.Tensor:
    """Returns the row of each item in each sub-table: int64 [M, k]."""
    if hashing.method == "modulo":
        return torch.from_numpy(np.mod(item_ids, np.int64(hashing.num_rows))[:, None])
    return torch.from_numpy(row_ids(item_ids, hashing.num_hashes, hashing.num_rows, hashing.seed))
