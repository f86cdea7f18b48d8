"""The jagged batch: where data and models meet.

In: histories as flat NumPy arrays with offsets. Out: tensors. A batch of B histories holds N events packed end to end
and the M distinct items among them; an event names its item by position in that list. So a table row is looked up
once per distinct item, however often the item occurs, and row ids are computed here, when the batch is built, never
inside `forward`.

    offsets  [B+1]  0 ────── 3 ───────────── 7      two histories, of 3 and of 4 events
    items    [N]    0  1  0    2  1  3  2           positions in the distinct items
    item_ids [M]    i₀ i₁ i₂ i₃                     M = 4
    item_rows [M, k]                                one row in each of the k sub-tables

Shapes: B rows (histories), N packed events, M distinct items, k hash functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core.config import check
from tackboard.core.hashing import MAX_ROWS, row_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashConfig:
    """How an item id becomes table rows."""

    num_hashes: int = 4
    """Hash functions, and sub-tables: an item's vector is the concatenation of one row of each."""
    num_rows: int = 4096
    """Rows of each sub-table."""
    seed: int = 0
    """Chooses the hash functions; part of the model."""

    def __post_init__(self) -> None:
        check(1 <= self.num_hashes <= 64, "model.hashing.num_hashes", self.num_hashes, "1 to 64")
        check(1 <= self.num_rows <= MAX_ROWS, "model.hashing.num_rows", self.num_rows, f"1 to {MAX_ROWS}")


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """B histories as tensors; see the module's picture."""

    offsets: torch.Tensor
    users: torch.Tensor
    items: torch.Tensor
    actions: torch.Tensor
    surfaces: torch.Tensor
    times_ms: torch.Tensor
    is_positive: torch.Tensor
    item_ids: torch.Tensor
    item_rows: torch.Tensor
    item_log_q: torch.Tensor

    @property
    def num_rows(self) -> int:
        """B, the number of histories."""
        return len(self.offsets) - 1

    @property
    def num_events(self) -> int:
        """N, the number of events."""
        return len(self.items)

    def lengths(self) -> torch.Tensor:
        """Events of each history [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on `device`."""
        return SequenceBatch(*(getattr(self, f.name).to(device, non_blocking=True) for f in dataclasses.fields(self)))


def make_batch(
    *,
    lengths: NDArray[np.int64],
    users: NDArray[np.int64],
    item_ids: NDArray[np.int64],
    actions: NDArray[np.int64],
    surfaces: NDArray[np.int64],
    times_ms: NDArray[np.int64],
    hashing: HashConfig,
    is_positive: NDArray[np.bool_] | None = None,
    log_q: Callable[[NDArray[np.int64]], NDArray[np.float32]] | None = None,
) -> SequenceBatch:
    """A batch of histories given end to end: `lengths` and `users` [B], the rest [N].

    `is_positive` [N] marks the events that a loss may predict; none, if not given. `log_q` gives the log of each
    distinct item's share of the training events, for the popularity correction of the loss; 0, if not given.
    """
    distinct, items = np.unique(item_ids, return_inverse=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    frequencies = log_q(distinct) if log_q is not None else np.zeros(len(distinct), dtype=np.float32)
    positive = is_positive if is_positive is not None else np.zeros(len(items), dtype=np.bool_)
    return SequenceBatch(
        offsets=torch.from_numpy(offsets),
        users=_tensor(users),
        items=_tensor(items),
        actions=_tensor(actions),
        surfaces=_tensor(surfaces),
        times_ms=_tensor(times_ms),
        is_positive=torch.from_numpy(np.array(positive, dtype=np.bool_, copy=True)),
        item_ids=_tensor(distinct),
        item_rows=item_rows(distinct, hashing),
        item_log_q=torch.from_numpy(np.ascontiguousarray(frequencies, dtype=np.float32)),
    )


def item_rows(item_ids: NDArray[np.int64], hashing: HashConfig) -> torch.Tensor:
    """Rows of items in each sub-table: int64 [M, k]."""
    return torch.from_numpy(row_ids(item_ids, hashing.num_hashes, hashing.num_rows, hashing.seed))


def _tensor(array: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64, copy=True))
