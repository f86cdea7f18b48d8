"""Finds the distinct items of a batch, and for each item its table rows and its share of the training events.

`distinct_items` is simple and slow: it sorts the items of one batch and hashes them. `DistinctItems` holds a list of
items whose table rows and shares are already known, such as the whole catalogue (`ItemTable`). An event names its item
by a code, which is the item's position in this list. Then the distinct items of a batch are found without sorting all
of its events:

    codes     4 0 4 2 0 2 2     the code of each event of the batch
    scratch   [·]               one entry for each item of the list; its old content does not matter
              1. Write each event's position at the event's code. Each entry keeps the last write, so only the last
                 event of each item reads its own position there. These last events give the distinct items.
              2. Write each distinct item's place in sorted order at its code. Reading the entries at the codes of all
                 events gives `items`.

Codes are usually stored with the dataset (data/positions.py). If they are not stored, `coded_items` makes the list and
the codes for the items of a window (the buckets that are in memory together). This takes longer than all other work on
the window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch.rows import HashConfig, item_rows

LogShares = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""A function from item ids to the log of each item's share of the training events."""


class ItemTable:
    """Lists M distinct items, in ascending order, with their table rows and log shares (0 if `log_q` is None)."""

    def __init__(self, ids: NDArray[np.int64], hashing: HashConfig, log_q: LogShares | None = None) -> None:
        self.ids = ids
        self.rows: NDArray[np.int64] = item_rows(ids, hashing).numpy()
        self.log_q = np.zeros(len(ids), dtype=np.float32) if log_q is None else log_q(ids)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns `item_ids`, `item_rows` and `item_log_q` of a batch with these items, without copying."""
        return {
            "item_ids": torch.from_numpy(self.ids),
            "item_rows": torch.from_numpy(self.rows),
            "item_log_q": torch.from_numpy(self.log_q),
        }


def distinct_items(
    item_ids: NDArray[np.int64], hashing: HashConfig, log_q: LogShares | None = None
) -> dict[str, torch.Tensor]:
    """Returns `items`, `item_ids`, `item_rows` and `item_log_q` of a batch with these events and candidates."""
    distinct, places = np.unique(item_ids, return_inverse=True)
    return {"items": torch.from_numpy(places), **ItemTable(distinct, hashing, log_q).tensors()}


class DistinctItems:
    """Holds an `ItemTable`; `of` finds the distinct items of a batch. Threads may not share one object."""

    def __init__(self, table: ItemTable) -> None:
        self._ids, self._log_q = table.ids, table.log_q
        # A row number is below 2^31. With 32 bits per number, more of a large array stays in the caches.
        self._rows = table.rows.astype(np.int32)
        self._scratch = np.empty(len(table.ids), dtype=np.int32)

    def with_own_scratch(self) -> DistinctItems:
        """Returns a copy for another thread; it shares the items but has its own scratch array."""
        twin = copy.copy(self)
        twin._scratch = np.empty_like(self._scratch)
        return twin

    def of(self, codes: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Returns what `distinct_items` returns for the items with these codes."""
        # `take` and `compress` do the same as indexing, but several times faster for arrays of this size. Codes have
        # 64 bits, because NumPy would convert shorter indices at every use.
        scratch, positions = self._scratch, np.arange(len(codes), dtype=np.int32)
        scratch[codes] = positions
        found = codes.compress(scratch.take(codes) == positions).astype(np.int32)
        found.sort()  # 32-bit numbers sort in half the time.
        distinct = found.astype(np.int64)
        scratch[distinct] = positions[: len(distinct)]
        return {
            "items": torch.from_numpy(scratch.take(codes).astype(np.int64)),
            "item_ids": torch.from_numpy(self._ids.take(distinct)),
            "item_rows": torch.from_numpy(self._rows.take(distinct, axis=0).astype(np.int64)),
            "item_log_q": torch.from_numpy(self._log_q.take(distinct)),
        }


def coded_items(
    item_ids: NDArray[np.int64], hashing: HashConfig, log_q: LogShares | None = None
) -> tuple[DistinctItems, NDArray[np.int64]]:
    """Returns the distinct items of a window, and the code of each element of `item_ids`: its position among them."""
    encoded = pa.array(item_ids).dictionary_encode()
    found = encoded.dictionary.to_numpy()
    order = np.argsort(found)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return DistinctItems(ItemTable(found[order], hashing, log_q)), place.take(encoded.indices.to_numpy())
