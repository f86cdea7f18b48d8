"""The plan: each event in one segment, each segment once an epoch, no step over its budget, all of it a function."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import ConfigError
from tackboard.data.step_plan import StepPlan, cut_segments, runs_of_all, share_of_rank

GOLDEN_STEPS = [[3, 4], [1, 2], [5, 0], [4, 3], [2, 5], [1, 0]]
GOLDEN_WINDOWED = [[1, 0], [2], [3, 4], [5], [5, 4], [3]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12), st.integers(2, 9))
@settings(max_examples=60)
def test_segments_cover_each_training_event_once(users: list[tuple[int, int]], max_length: int) -> None:
    """A user has some training events, then some held-out ones that no segment may touch."""
    sizes = np.array(users, dtype=np.int64).reshape(-1, 2)
    begins = np.cumsum(sizes.sum(axis=1)) - sizes.sum(axis=1)
    ends = begins + sizes[:, 0]
    segments = cut_segments(begins, ends, max_length)
    assert ((segments.lengths >= 1) & (segments.lengths <= max_length)).all()
    covered = [
        event
        for start, length in zip(segments.starts, segments.lengths, strict=True)
        for event in range(start, start + length)
    ]
    assert covered == [event for begin, end in zip(begins, ends, strict=True) for event in range(begin, end)]
    assert (segments.starts >= begins[segments.users]).all()
    assert (segments.starts + segments.lengths <= ends[segments.users]).all()
    total = int(sizes.sum())
    runs = runs_of_all(segments, total, max_length)
    assert [runs[0], runs[-1]] == [0, total]
    assert ((np.diff(runs) >= 1) & (np.diff(runs) <= max_length)).all()
    wanted = zip(segments.starts.tolist(), (segments.starts + segments.lengths).tolist(), strict=True)
    assert set(wanted) <= set(itertools.pairwise(runs.tolist()))


def test_the_newest_segment_is_full_and_the_oldest_takes_the_rest() -> None:
    segments = cut_segments(np.array([10]), np.array([17]), 3)
    assert list(zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)) == [(10, 1), (11, 3), (14, 3)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12), st.integers(2, 9))
@settings(max_examples=60)
def test_the_newest_segment_alone_is_the_last_of_all(users: list[tuple[int, int]], max_length: int) -> None:
    sizes = np.array(users, dtype=np.int64).reshape(-1, 2)
    begins = np.cumsum(sizes.sum(axis=1)) - sizes.sum(axis=1)
    ends = begins + sizes[:, 0]
    segments = cut_segments(begins, ends, max_length, newest_only=True)
    expected = [
        (user, max(int(begin), int(end) - max_length), min(int(end - begin), max_length))
        for user, (begin, end) in enumerate(zip(begins, ends, strict=True))
        if end > begin
    ]
    found = zip(segments.users.tolist(), segments.starts.tolist(), segments.lengths.tolist(), strict=True)
    assert list(found) == expected
    whole = cut_segments(begins, ends, max_length)
    newest = {int(user): place for place, user in enumerate(whole.users)}
    assert whole.take(np.array(list(newest.values()), dtype=np.int64)).starts.tolist() == segments.starts.tolist()


class Segmented:
    """A plan over segments of given lengths, some in each bucket, and the segments behind its parts."""

    def __init__(self, buckets: list[list[int]], *, budget: int, seed: int = 0, window: int = 1000) -> None:
        self.lengths = np.array([length for bucket in buckets for length in bucket], dtype=np.int64)
        self.bucket_of = np.repeat(np.arange(len(buckets)), [len(bucket) for bucket in buckets])
        self.plan = StepPlan(
            np.array([sum(bucket) for bucket in buckets], dtype=np.int64),
            longest=int(self.lengths.max(initial=0)),
            tokens_per_step=budget,
            seed=seed,
            buckets_per_window=window,
        )

    def segments_of(self, step: int) -> list[int]:
        epoch, window, place = self.plan.locate(step)
        inside = np.flatnonzero(np.isin(self.bucket_of, self.plan.buckets_of(epoch, window)))
        order, bounds = self.plan.deal(epoch, window, self.lengths[inside])
        found: list[int] = inside[order[bounds[place] : bounds[place + 1]]].tolist()
        return found

    def epoch(self, number: int) -> list[list[int]]:
        return [self.segments_of(step) for step in range(*map(self.plan.first_step, (number, number + 1)))]


@given(
    st.lists(st.lists(st.integers(1, 12), max_size=12), min_size=1, max_size=9).filter(any),
    st.integers(24, 80),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(1, 4),
)
@settings(max_examples=80)
def test_an_epoch_visits_every_segment_once_within_the_budget(
    buckets: list[list[int]], budget: int, seed: int, epoch: int, window: int
) -> None:
    data = Segmented(buckets, budget=budget, seed=seed, window=window)
    steps = data.epoch(epoch)
    assert sorted(segment for step in steps for segment in step) == list(range(len(data.lengths)))
    assert max(int(data.lengths[step].sum()) for step in steps) <= budget


def test_steps_are_nearly_full() -> None:
    data = Segmented([[8] * 100] * 10, budget=800)
    assert data.plan.steps_per_epoch == 11  # 8000 tokens over at most 792
    assert min(int(data.lengths[step].sum()) for step in data.epoch(0)) > 700
    windowed = Segmented([[8] * 100] * 10, budget=800, window=3)
    assert windowed.plan.steps_per_epoch == 3 + 4 + 3 + 4  # 1600 or 2400 tokens in each of four windows
    assert min(int(windowed.lengths[step].sum()) for step in windowed.epoch(0)) >= 400


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    buckets = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]

    def fresh(seed: int) -> Segmented:
        return Segmented(buckets, budget=30, seed=seed, window=2)

    plan = fresh(1)
    steps = range(4 * plan.plan.steps_per_epoch)
    forwards = {step: plan.segments_of(step) for step in steps}
    assert forwards == {step: fresh(1).segments_of(step) for step in reversed(steps)}
    assert len({str(plan.epoch(0)), str(plan.epoch(1)), str(fresh(2).epoch(0))}) == 3


def test_golden_order_never_changes() -> None:
    """A run started by an older version resumes on the data it would have read, where that is one window."""
    assert [
        Segmented([[3, 1], [4], [1, 5, 2]], budget=12, seed=7).segments_of(step) for step in range(6)
    ] == GOLDEN_STEPS
    windowed = Segmented([[3, 1], [4], [1, 5, 2]], budget=12, seed=7, window=1)
    assert [windowed.segments_of(step) for step in range(6)] == GOLDEN_WINDOWED


def test_buckets_of_a_window_are_read_in_the_order_of_the_file_and_mixed_between_epochs() -> None:
    plan = Segmented([[1]] * 40, budget=10, seed=3, window=8).plan
    assert plan.num_windows == 5
    windows = [plan.buckets_of(epoch, window).tolist() for epoch in (0, 1) for window in range(5)]
    assert all(window == sorted(window) for window in windows)
    for epoch in (windows[:5], windows[5:]):
        assert sorted(bucket for window in epoch for bucket in window) == list(range(40))
    assert windows[:5] != windows[5:]


def test_steps_are_numbered_through_windows_and_epochs() -> None:
    plan = Segmented([[2] * size for size in (50, 9, 31, 77, 20)], budget=20, window=2).plan
    places = [plan.locate(step) for step in range(plan.first_step(3))]
    assert places == sorted(set(places))
    for epoch in range(3):
        inside = [place for place in places if place[0] == epoch]
        assert len(inside) == plan.first_step(epoch + 1) - plan.first_step(epoch)
        assert sorted({window for _, window, _ in inside}) == [0, 1, 2]
    assert plan.steps_per_epoch == plan.first_step(1)


def test_a_budget_below_two_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens_per_step = 15") as caught:
        Segmented([[8, 1]], budget=15)
    assert caught.value.fix == "raise data.tokens_per_step, or lower data.max_length"
    Segmented([[8, 1]], budget=16)


@given(st.lists(st.integers(1, 64), min_size=4, max_size=80), st.sampled_from([1, 2, 3, 4]))
def test_the_shares_of_the_ranks_are_the_step_and_nearly_equal(lengths: list[int], world_size: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    shares = [share_of_rank(sizes, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    assert all((np.diff(share) > 0).all() for share in shares)
    loads = [int(sizes[share].sum()) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_more_ranks_than_segments_leaves_some_without() -> None:
    assert [share_of_rank(np.array([5, 6]), rank, 3).tolist() for rank in range(3)] == [[1], [0], []]


@given(st.lists(st.integers(1, 12), min_size=40, max_size=90), st.sampled_from([2, 3, 4]))
@settings(max_examples=30)
def test_what_ranks_are_dealt_is_together_what_one_is(lengths: list[int], world_size: int) -> None:
    plan = Segmented([lengths], budget=120).plan
    sizes = np.array(lengths, dtype=np.int64)
    whole, bounds = plan.deal(0, 0, sizes)
    dealt = [plan.deal(0, 0, sizes, rank, world_size) for rank in range(world_size)]
    for place in range(len(bounds) - 1):
        step = whole[bounds[place] : bounds[place + 1]].tolist()
        shares = [mine[cuts[place] : cuts[place + 1]].tolist() for mine, cuts in dealt]
        assert sorted(unit for share in shares for unit in share) == sorted(step)
        assert all(share == [unit for unit in step if unit in share] for share in shares)
