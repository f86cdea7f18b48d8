"""Padded batches: their sizes repeat, and what was in them is still there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, Jagged, SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.batch.padding import SPARE, pad_batch, padded_size
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, TIME


def histories(lengths: list[int], num_drawn: int = 0) -> SequenceBatch:
    count = sum(lengths)
    batch = make_batch(
        history=sequence_column(
            np.array(lengths),
            item=Column(ID, np.arange(count) % 7),
            time=Column(TIME, np.arange(count) * 1000 + 5),
        ),
        users=np.arange(len(lengths)) // 2 + 10,
        is_positive=np.arange(count) % 3 > 0,
        hashing=HashConfig(num_hashes=2, num_rows=16),
    )
    lists = Jagged(torch.arange(2 * count), torch.arange(count + 1) * 2)
    request = {"hour": torch.arange(count).float(), "topics": lists}
    return SequenceBatch(**vars(batch) | {"request": request, "sampled": torch.arange(num_drawn) + 1})


def test_sizes_are_few_and_little_larger() -> None:
    sizes = [padded_size(count) for count in range(1 << 17)]
    assert all(size > count and size % SPARE == 0 for count, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert len(set(sizes[4096:8192])) == 17 and len(set(sizes[65537:])) == 16
    growth = [size / count - 1 for count, size in enumerate(sizes) if count >= 4096]
    assert max(growth) < 0.07 and sum(growth) / len(growth) < 0.03
    assert padded_size(65_536) == 65_536 + SPARE, "a step that fills its budget is hardly padded"


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 0], [1], [40] * 40, [2, 600], [5] * 1000, []])
@pytest.mark.parametrize("num_drawn", [0, 3])
def test_padding_comes_after_what_was_there(lengths: list[int], num_drawn: int) -> None:
    batch = histories(lengths, num_drawn)
    padded = pad_batch(batch)
    assert padded.num_events == padded_size(batch.num_events) and padded.num_tokens == batch.num_tokens == sum(lengths)
    assert padded.num_examples() == batch.num_examples() and padded.num_padding > 0
    assert torch.equal(padded.offsets[: batch.num_rows + 1], batch.offsets)
    assert padded.offsets[-1] == padded.num_events == len(padded.is_positive)
    assert padded.num_rows % SPARE == 0 and len(padded.users) == padded.num_rows
    added = padded.lengths()[batch.num_rows :]
    assert 1 <= added[0] <= max([1, *lengths]) and added.max() == added[0] and added[0] - added[-1] <= 1
    assert set(padded.users.tolist()) - set(batch.users.tolist()) <= ({0} if not lengths else set())
    for name in ("items", "item_ids", "item_rows", "item_log_q", "sampled", "is_positive"):
        before, after = getattr(batch, name), getattr(padded, name)
        assert after.dtype == before.dtype and torch.equal(after[: len(before)], before), name
    assert torch.equal(padded.times_ms[: batch.num_events], batch.times_ms)
    num_items = len(batch.item_ids)
    assert (padded.item_rows[num_items:] == -1).all() and (padded.items[batch.num_events :] >= num_items).all()
    assert set(padded.sampled.tolist()) == set(batch.sampled.tolist())
    hours, topics = padded.request["hour"], padded.request["topics"]
    assert isinstance(hours, torch.Tensor) and len(hours) == padded.num_events
    assert isinstance(topics, Jagged) and len(topics.lengths()) == padded.num_events
    assert topics.lengths()[batch.num_events :].sum() == 0


def test_batches_of_nearly_equal_steps_share_their_sizes() -> None:
    """Rows, items and events differ from step to step; the padded sizes do not."""
    shapes = set()
    for seed in range(20):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 40, 220)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), 4000)].tolist()
        padded = pad_batch(histories([*lengths, 4000 - sum(lengths)], num_drawn=5))
        shapes.add(tuple(tuple(tensor.shape) for tensor in padded.tensors()[:-2]))
    assert len(shapes) <= 3


def test_moved_and_pinned_batches_know_their_padding() -> None:
    padded = pad_batch(histories([3, 4]))
    assert padded.to(torch.device("cpu")).num_tokens == 7
    assert padded.with_targets(padded.offsets).num_tokens == 7
