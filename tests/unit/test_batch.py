"""The jagged batch: distinct items, offsets and rows, by hand and against core's hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, item_rows, make_batch
from tackboard.core.errors import ConfigError
from tackboard.core.hashing import row_ids

HASHING = HashConfig(num_hashes=3, num_rows=11, seed=4)


def batch_of(lengths: list[int], items: list[int], **fields: object) -> SequenceBatch:
    count = np.arange(len(items), dtype=np.int64)
    return make_batch(
        lengths=np.array(lengths, dtype=np.int64),
        users=np.arange(len(lengths), dtype=np.int64) + 70,
        item_ids=np.array(items, dtype=np.int64),
        actions=count % 3,
        surfaces=count % 2,
        times_ms=count * 1000,
        hashing=HASHING,
        **fields,  # type: ignore[arg-type]
    )


def test_the_picture_of_the_module() -> None:
    batch = batch_of([3, 4], [50, -9, 50, 8, -9, 2**62, 8])
    assert batch.offsets.tolist() == [0, 3, 7]
    assert batch.lengths().tolist() == [3, 4]
    assert batch.item_ids.tolist() == [-9, 8, 50, 2**62]
    assert batch.item_ids[batch.items].tolist() == [50, -9, 50, 8, -9, 2**62, 8]
    assert batch.item_rows.tolist() == row_ids(batch.item_ids.numpy(), 3, 11, 4).tolist()
    assert (batch.num_rows, batch.num_events) == (2, 7)
    assert batch.users.tolist() == [70, 71]


def test_an_item_has_the_same_rows_wherever_it_occurs() -> None:
    alone, among = item_rows(np.array([8]), HASHING), item_rows(np.array([-9, 8, 50]), HASHING)
    assert alone[0].tolist() == among[1].tolist()


@pytest.mark.parametrize(("lengths", "items"), [([], []), ([0], []), ([0, 2, 0], [5, 5])])
def test_empty_histories(lengths: list[int], items: list[int]) -> None:
    batch = batch_of(lengths, items)
    assert batch.lengths().tolist() == lengths
    assert batch.num_events == len(items)
    assert batch.item_rows.shape == (len(set(items)), 3)


def test_nothing_is_positive_and_nothing_corrected_unless_given() -> None:
    batch = batch_of([2], [5, 6])
    assert not batch.is_positive.any()
    assert batch.item_log_q.tolist() == [0, 0]
    assert batch.item_log_q.dtype == torch.float32


def test_positives_and_frequencies_are_taken_over_per_distinct_item() -> None:
    asked: list[list[int]] = []

    def log_q(items: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(items.tolist())
        return (items / 2).astype(np.float32)

    batch = batch_of([3], [9, 4, 9], is_positive=np.array([True, False, True]), log_q=log_q)
    assert asked == [[4, 9]]
    assert batch.item_log_q.tolist() == [2.0, 4.5]
    assert batch.is_positive.tolist() == [True, False, True]


def test_a_batch_owns_its_memory() -> None:
    """A batch is cut from arrays that live as long as the dataset; writing to one must never reach the other."""
    times = np.arange(4, dtype=np.int64)
    batch = make_batch(
        lengths=np.array([4]), users=times[:1], item_ids=times, actions=times, surfaces=times, times_ms=times,
        hashing=HASHING,
    )  # fmt: skip
    batch.times_ms.add_(1)
    assert times.tolist() == [0, 1, 2, 3]


def test_to_moves_every_tensor() -> None:
    moved = batch_of([2], [5, 6]).to(torch.device("meta"))
    assert {getattr(moved, name).device.type for name in moved.__dataclass_fields__} == {"meta"}


@pytest.mark.parametrize("wrong", [{"num_hashes": 0}, {"num_hashes": 65}, {"num_rows": 0}, {"num_rows": 2**31}])
def test_impossible_hashing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HashConfig(**wrong)
