"""The plan: each event in one segment, each segment once an epoch, no step over its budget, all of it a function."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import ConfigError
from tackboard.data.plan import StepPlan, cut_segments

GOLDEN_STEPS = [[3, 4], [1, 2], [5, 0], [4, 3], [2, 5], [1, 0]]
lengths_of_segments = st.lists(st.integers(1, 12), min_size=1, max_size=60)


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


def test_the_newest_segment_is_full_and_the_oldest_takes_the_rest() -> None:
    segments = cut_segments(np.array([10]), np.array([17]), 3)
    assert list(zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)) == [(10, 1), (11, 3), (14, 3)]


@given(lengths_of_segments, st.integers(24, 80), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=60)
def test_an_epoch_visits_every_segment_once_within_the_budget(
    lengths: list[int], budget: int, seed: int, epoch: int
) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    plan = StepPlan(sizes, tokens_per_step=budget, seed=seed)
    first = epoch * plan.steps_per_epoch
    steps = [plan.segments_of(step) for step in range(first, first + plan.steps_per_epoch)]
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    assert max(int(sizes[step].sum()) for step in steps) <= budget


def test_steps_are_nearly_full() -> None:
    sizes = np.full(1000, 8, dtype=np.int64)
    plan = StepPlan(sizes, tokens_per_step=800, seed=0)
    assert plan.steps_per_epoch == 11  # 8000 tokens over at most 792
    tokens = [int(sizes[plan.segments_of(step)].sum()) for step in range(11)]
    assert min(tokens) > 700


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    sizes = np.arange(1, 13, dtype=np.int64)
    plan = StepPlan(sizes, tokens_per_step=30, seed=1)
    steps = range(4 * plan.steps_per_epoch)
    forwards = {step: plan.segments_of(step).tolist() for step in steps}
    backwards = {
        step: StepPlan(sizes, tokens_per_step=30, seed=1).segments_of(step).tolist() for step in reversed(steps)
    }
    assert forwards == backwards

    def epoch(of: StepPlan, number: int) -> list[int]:
        first = number * of.steps_per_epoch
        return [int(s) for step in range(first, first + of.steps_per_epoch) for s in of.segments_of(step)]

    assert epoch(plan, 0) != epoch(plan, 1)
    assert epoch(plan, 0) != epoch(StepPlan(sizes, tokens_per_step=30, seed=2), 0)


def test_golden_order_never_changes() -> None:
    """A run started by an older version resumes on the data it would have read."""
    plan = StepPlan(np.array([3, 1, 4, 1, 5, 2], dtype=np.int64), tokens_per_step=12, seed=7)
    assert [plan.segments_of(step).tolist() for step in range(6)] == GOLDEN_STEPS


def test_a_pickled_plan_goes_on_the_same() -> None:
    plan = StepPlan(np.arange(1, 13, dtype=np.int64), tokens_per_step=30, seed=1)
    plan.segments_of(3)
    copy = pickle.loads(pickle.dumps(plan))
    assert [copy.segments_of(s).tolist() for s in range(9)] == [plan.segments_of(s).tolist() for s in range(9)]


def test_a_budget_below_two_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens_per_step = 15"):
        StepPlan(np.array([8, 1], dtype=np.int64), tokens_per_step=15, seed=0)
    StepPlan(np.array([8, 1], dtype=np.int64), tokens_per_step=16, seed=0)
