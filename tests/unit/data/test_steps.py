"""Numbered steps over any kind of unit: here words with lengths, so that every batch can be read."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.data.step_plan import StepPlan
from tackboard.data.steps import NumberedSteps

BUCKETS = [["a", "bb", "ccc"], ["dd", "e"], ["ffff", "g", "hh"], ["iii", "jj"], ["k"]]


class Words:
    """The words of some buckets, in a given order, cut into steps."""

    def __init__(self, words: list[str], bounds: NDArray[np.int64]) -> None:
        self.words = words
        self.bounds = bounds

    def batch(self, place: int) -> list[str]:
        return self.words[self.bounds[place] : self.bounds[place + 1]]


class WordSteps(NumberedSteps[list[str]]):
    def __init__(self, budget: int, *, window: int = 2, rank: int = 0, world_size: int = 1) -> None:
        tokens = np.array([sum(map(len, bucket)) for bucket in BUCKETS], dtype=np.int64)
        plan = StepPlan(tokens, longest=4, tokens_per_step=budget, seed=2, buckets_per_window=window)
        super().__init__(plan, rank=rank, world_size=world_size)
        self.loaded: list[tuple[int, int]] = []
        self.fails_at: tuple[int, int] | None = None

    def load_window(self, epoch: int, number: int) -> Words:
        self.loaded.append((epoch, number))
        if self.fails_at == (epoch, number):
            raise DataError("a window cannot be read")
        words = [word for bucket in self.plan.buckets_of(epoch, number) for word in BUCKETS[bucket]]
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        order, bounds = self.plan.deal(epoch, number, lengths, self.rank, self.world_size)
        return Words([words[place] for place in order], bounds)


def test_an_epoch_in_order_reads_every_window_once() -> None:
    steps = WordSteps(9)
    epochs = []
    for epoch in range(3):
        epochs.append([steps[step] for step in range(*map(steps.plan.first_step, (epoch, epoch + 1)))])
        assert sorted(word for batch in epochs[-1] for word in batch) == sorted(sum(BUCKETS, []))  # noqa: RUF017
    assert epochs[0] != epochs[1] != epochs[2]
    assert steps.loaded == [(epoch, window) for epoch in range(3) for window in range(3)]


def test_a_step_is_the_same_whatever_was_read_before() -> None:
    fresh = [WordSteps(9)[step] for step in range(12)]
    backwards = WordSteps(9)
    assert [backwards[step] for step in reversed(range(12))][::-1] == fresh
    assert pickle.loads(pickle.dumps(backwards))[7] == fresh[7]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_step(world_size: int) -> None:
    whole = WordSteps(16)
    ranks = [WordSteps(16, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(whole.plan.steps_per_epoch):
        shares = [rank[step] for rank in ranks]
        assert sorted(word for share in shares for word in share) == sorted(whole[step])


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_workers_give_the_asked_steps_in_the_asked_order(num_workers: int) -> None:
    steps = WordSteps(9)
    for numbers in ([4, 4, 0, 11, 2], list(range(20)), []):
        assert list(steps.iterate(numbers, num_workers)) == [(number, steps[number]) for number in numbers]


def test_workers_prepare_so_many_windows_ahead_and_no_more() -> None:
    steps = WordSteps(9, window=1)
    pairs = steps.iterate(range(40), num_workers=2)
    next(pairs)
    keys = sorted({steps.plan.locate(step)[:2] for step in range(40)})
    for _ in range(100):
        if len(steps.loaded) == 3:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert sorted(steps.loaded) == keys[:3]
    pairs.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_worker_reaches_the_trainer_at_its_step(num_workers: int) -> None:
    steps = WordSteps(9)
    steps.fails_at = (0, 1)
    seen = []
    with pytest.raises(DataError, match="cannot be read"):
        for number, _ in steps.iterate(range(20), num_workers):
            seen.append(number)
    assert seen == [number for number in range(20) if steps.plan.locate(number)[:2] == (0, 0)]


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 2), (0, 0), (7, 2)])
def test_a_rank_that_cannot_be_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=f"rank is {rank} of {world_size}"):
        WordSteps(9, rank=rank, world_size=world_size)
    with pytest.raises(UsageError, match="step -1"):
        _ = WordSteps(9)[-1]
