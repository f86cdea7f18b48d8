"""Slices of a window."""

from __future__ import annotations

import numpy as np

from tackboard.batch import HashConfig
from tackboard.data.index import ItemFrequencies
from tackboard.data.plan import cut_segments
from tackboard.data.sequences import Sequences
from tackboard.data.window import Segmented, Window

HASHING = HashConfig(num_hashes=3, num_rows=50)


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
