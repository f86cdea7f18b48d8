"""The distinct items of a batch, by sorting and without."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tackboard.batch import HashConfig, item_rows
from tackboard.batch.items import DistinctItems, ItemTable, coded_items, distinct_items

HASHING = HashConfig(num_hashes=3, num_rows=50)


def log_share(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    return (ids % 7 / 8).astype(np.float32)


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=40), st.data())
def test_distinct_items_of_any_part(ids: list[int], data: st.DataObject) -> None:
    """With a table of the window's own items, and with a table of a catalogue that holds further items."""
    values = np.array(ids, dtype=np.int64)
    more = np.array(data.draw(st.lists(st.integers(-9, 9), max_size=9)), dtype=np.int64)
    catalogue = np.union1d(values, more)
    of_catalogue = DistinctItems(ItemTable(catalogue, HASHING, log_share))
    of_window, codes = coded_items(values, HASHING, log_share)
    places = catalogue.searchsorted(values)
    own = of_window.with_own_scratch()
    for items, numbers in [(of_window, codes), (of_catalogue, places), (own, codes), (of_catalogue, places)]:
        # The same table is used again: what an earlier batch left behind must not show.
        first = data.draw(st.integers(0, len(ids)))
        last = data.draw(st.integers(first, len(ids)))
        found = items.of(numbers[first:last])
        distinct, inverse = np.unique(values[first:last], return_inverse=True)
        assert found["item_ids"].tolist() == distinct.tolist()
        assert found["items"].tolist() == inverse.tolist()
        assert torch.equal(found["item_rows"], item_rows(distinct, HASHING))
        assert found["item_log_q"].tolist() == log_share(distinct).tolist()
        alone = distinct_items(values[first:last], HASHING, log_share)
        assert list(found) == list(alone)
        assert all(torch.equal(found[name], alone[name]) for name in alone)
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            "items": torch.int64,
            "item_ids": torch.int64,
            "item_rows": torch.int64,
            "item_log_q": torch.float32,
        }
