"""Distinct items without sorting events, and slices of a window."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tackboard.batch import HashConfig, item_rows
from tackboard.data.index import ItemFrequencies
from tackboard.data.plan import cut_segments
from tackboard.data.sequences import Sequences
from tackboard.data.window import DistinctItems, Segmented, Window

HASHING = HashConfig(num_hashes=3, num_rows=50)


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=40), st.data())
def test_distinct_items_of_any_part(ids: list[int], data: st.DataObject) -> None:
    values = np.array(ids, dtype=np.int64)
    frequencies = ItemFrequencies.of(values)
    items = DistinctItems(values, HASHING, frequencies)
    for _ in range(3):  # What an earlier batch left behind must not show.
        first = data.draw(st.integers(0, len(ids)))
        last = data.draw(st.integers(first, len(ids)))
        found = items.of(items.codes[first:last])
        distinct, inverse = np.unique(values[first:last], return_inverse=True)
        assert found["item_ids"].tolist() == distinct.tolist()
        assert found["items"].tolist() == inverse.tolist()
        assert torch.equal(found["item_rows"], item_rows(distinct, HASHING))
        assert found["item_log_q"].tolist() == frequencies.log_share(distinct).tolist()
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            "items": torch.int64,
            "item_ids": torch.int64,
            "item_rows": torch.int64,
            "item_log_q": torch.float32,
        }


def test_a_batch_owns_its_memory(tiny_sequences: Sequences) -> None:
    """A view would keep the whole window in memory."""
    data = tiny_sequences
    segments = cut_segments(data.offsets[:-1], data.train_ends, 4)
    bounds = np.array([0, 1, 4, len(segments.starts)])
    window = Window(Segmented(data, segments, HASHING, ItemFrequencies.of(data.item_ids)), bounds)
    batch = window.batch(1)
    assert batch.lengths().tolist() == segments.lengths[1:4].tolist()
    tensors = [batch.users, batch.items, batch.is_positive, batch.item_rows, *batch.columns.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
