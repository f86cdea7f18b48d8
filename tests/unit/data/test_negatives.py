"""Items drawn from the catalogue: a function of their key, each as often as it says; events stay what they were."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch, item_rows
from tackboard.core.keyed_random import bits
from tackboard.data.cluster import _for_workers
from tackboard.data.index import ItemFrequencies
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.negatives import NEGATIVE_STREAM, UniformNegatives
from tackboard.data.source import SequenceSource, open_sequences

HASHING = HashConfig(num_hashes=2, num_rows=16)
PLAIN = HashConfig(num_hashes=1, num_rows=7, method="modulo")
CONFIG = DataConfig(dataset="tiny", max_length=8, tokens_per_step=40, window_buckets=2)
INT64 = np.iinfo(np.int64)
ITEM_FIELDS = ("items", "item_ids", "item_rows", "item_log_q", "sampled", "sample_rate")


@pytest.fixture(scope="module")
def source(bucketed_dataset: Path) -> SequenceSource:
    return open_sequences(bucketed_dataset, ("click", "save"))


def steps_with(source: SequenceSource, count: int, *, seed: int = 3, **more: Any) -> TrainingSteps:
    hashing = more.pop("hashing", HASHING)
    return TrainingSteps(source, dataclasses.replace(CONFIG, uniform_negatives=count), hashing, seed, **more)


def as_lists(batch: SequenceBatch) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return {name: plain(part) for name, part in value.items()} if isinstance(value, dict) else value.tolist()

    return {name: plain(getattr(batch, name)) for name in batch.__dataclass_fields__}


def drawn_ids(batch: SequenceBatch) -> list[int]:
    return batch.item_ids[batch.sampled].tolist()


@pytest.mark.parametrize("hashing", [HASHING, PLAIN])
@pytest.mark.parametrize("count", [1, 9, 23, 24, 500])
def test_a_batch_has_its_events_and_further_items(source: SequenceSource, count: int, hashing: HashConfig) -> None:
    """The slow twin: what the key draws, one by one, and the batch without negatives."""
    plain, more = steps_with(source, 0, hashing=hashing), steps_with(source, count, hashing=hashing)
    catalogue = source.catalogue.tolist()
    assert len(catalogue) == 24
    for step in range(plain.plan.first_step(2)):
        without, batch = plain[step], more[step]
        epoch, window, place = plain.plan.locate(step)
        draws = [int(bits(3, NEGATIVE_STREAM, epoch, window, place, number)[0]) >> 32 for number in range(count)]
        drawn = {catalogue[(draw * 24) >> 32] for draw in draws} if count < 24 else set(catalogue)
        assert drawn_ids(batch) == sorted(drawn)
        assert batch.item_ids.tolist() == sorted(drawn | set(without.item_ids.tolist()))
        assert batch.item_ids[batch.items].tolist() == without.item_ids[without.items].tolist()
        assert torch.equal(batch.item_rows, item_rows(batch.item_ids.numpy(), hashing))
        shares = plain.index.frequencies.log_share(batch.item_ids.numpy())
        assert batch.item_log_q.tolist() == shares.tolist()
        expected = 1.0 if count >= 24 else 1 - (1 - 1 / 24) ** count
        assert float(batch.sample_rate) == pytest.approx(expected, rel=1e-6)
        others = {name: value for name, value in as_lists(without).items() if name not in ITEM_FIELDS}
        assert others == {name: value for name, value in as_lists(batch).items() if name not in ITEM_FIELDS}
        dtypes = [(getattr(batch, name).dtype, getattr(without, name).dtype) for name in ITEM_FIELDS]
        assert all(found == wanted for found, wanted in dtypes)


@pytest.mark.parametrize("count", [9, 500])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_orders_and_processes_change_nothing(source: SequenceSource, count: int, num_workers: int) -> None:
    steps = steps_with(source, count)
    numbers = [5, 0, 17, 3, 4]
    alone = [(number, as_lists(batch)) for number, batch in steps.iterate(numbers, num_workers=0)]
    fresh = steps_with(source, count)
    assert [(number, as_lists(batch)) for number, batch in fresh.iterate(numbers, num_workers)] == alone
    sent = [pickle.loads(pickle.dumps(copy)) for copy in (steps, _for_workers(steps))]
    for number, expected in reversed(alone):  # A resumed run begins anywhere.
        assert all(as_lists(copy[number]) == expected for copy in (steps_with(source, count), *sent))


def test_every_rank_draws_the_same(source: SequenceSource) -> None:
    whole = steps_with(source, 9)
    ranks = [steps_with(source, 9, rank=rank, world_size=3) for rank in range(3)]
    for step in (0, 4, 9):
        assert {tuple(drawn_ids(rank[step])) for rank in ranks} == {tuple(drawn_ids(whole[step]))}


@pytest.mark.parametrize(("num_items", "count"), [(10, 3), (10, 9), (1000, 300)])
def test_each_item_is_there_as_often_as_the_rate_says(num_items: int, count: int) -> None:
    num_draws = 1500
    ids = np.arange(num_items, dtype=np.int64)
    negatives = UniformNegatives(ids, count, HASHING, ItemFrequencies.of(ids), seed=1)
    found = np.zeros(num_items)
    empty = empty_batch()
    for draw in range(num_draws):
        batch = negatives.add(empty, 0, 0, draw)
        found[batch.item_ids.numpy()] += 1
        assert batch.sampled.tolist() == list(range(len(batch.item_ids)))
    rate = float(batch.sample_rate)
    spread = math.sqrt(rate * (1 - rate) / num_draws)
    assert np.abs(found / num_draws - rate).max() < 4.5 * spread
    assert found.mean() / num_draws == pytest.approx(rate, abs=4 * spread / math.sqrt(num_items))


def test_ids_at_the_ends_of_64_bits_can_be_drawn() -> None:
    ids = np.array([INT64.min, -1, 0, INT64.max])
    for hashing in (HASHING, PLAIN):
        negatives = UniformNegatives(ids, 3, hashing, ItemFrequencies.of(ids), seed=1)
        drawn = [negatives.add(empty_batch(), draw) for draw in range(20)]
        assert sorted({item for batch in drawn for item in batch.item_ids.tolist()}) == ids.tolist()
        assert all(int(batch.item_rows.min()) >= 0 for batch in drawn)
        assert all(int(batch.item_rows.max()) < hashing.num_rows for batch in drawn)
        everything = UniformNegatives(ids, 4, hashing, ItemFrequencies.of(ids), seed=1).add(empty_batch(), 0)
        assert everything.item_ids.tolist() == ids.tolist()


def test_a_batch_may_be_changed_without_changing_the_next(source: SequenceSource) -> None:
    """The catalogue's rows are kept, and handed out as copies."""
    steps = steps_with(source, 500)
    first, before = steps[0], as_lists(steps[1])
    for tensor in (first.item_ids, first.item_rows, first.item_log_q, first.sampled):
        tensor.zero_()
    assert as_lists(steps[1]) == before


def empty_batch() -> SequenceBatch:
    """What a step of the plan without a segment is."""
    none = torch.zeros(0, dtype=torch.int64)
    return SequenceBatch(
        offsets=torch.zeros(1, dtype=torch.int64),
        users=none,
        items=none,
        columns={},
        request={},
        is_positive=torch.zeros(0, dtype=torch.bool),
        item_ids=none,
        item_rows=torch.zeros(0, 2, dtype=torch.int64),
        item_log_q=torch.zeros(0),
    )
