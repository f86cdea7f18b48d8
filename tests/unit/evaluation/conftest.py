"""Two kinds of logs. One is small enough to rank by hand: items A to D, three users with a history, two without.

The other kind is for a cut in time. It has events that were received late, events of one instant, users on one side of
the cut only, and items that appear after the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.data.time_split import HOUR_MS, TimeSplit

A, B, C, D = 10, 11, 12, 13
LOG = [
    # user, item, action, surface, time. The last click of a user is the target.
    (1, A, "click", "home", 1),
    (1, B, "click", "home", 2),
    (1, A, "click", "home", 3),
    (1, C, "click", "home", 4),
    (2, A, "click", "home", 1),
    (2, C, "click", "home", 2),
    (2, B, "click", "home", 3),
    (2, D, "hide", "home", 4),  # after the target: seen by nobody
    (3, D, "hide", "home", 1),
    (3, A, "click", "home", 2),
    (4, B, "click", "home", 1),  # a target without a history: not evaluated
    (5, B, "hide", "home", 1),  # a history without a target: not evaluated
]


@pytest.fixture
def hand_made(tmp_path: Path, make_dataset: Callable[..., Path]) -> Sequences:
    return load_sequences(make_dataset(tmp_path, LOG, name="hand"), ("click",))


CUT_MS = 1_714_521_600_000 + 60 * HOUR_MS
"""The cut of a `timed_log`."""


@pytest.fixture
def by_time(tmp_path: Path, make_timed: Callable[..., Path]) -> Callable[..., Sequences]:
    """`by_time(seed, seed_after=…, slice_hours=…)`: the sequences of a `timed_log`, cut after 60 hours."""

    def make(seed: int, seed_after: int | None = None, slice_hours: float = 0.0) -> Sequences:
        dataset = make_timed(tmp_path / f"{seed}-{seed_after}-{slice_hours}", seed, seed_after)
        split = TimeSplit(until_ms=CUT_MS - round(slice_hours * HOUR_MS), cut_ms=CUT_MS)
        return load_sequences(dataset, ("click", "save"), time_split=lambda _dataset: split)

    return make


@pytest.fixture
def last_out(tmp_path: Path, make_timed: Callable[..., Path]) -> Callable[..., Sequences]:
    """`last_out(seed)`: the same log without a cut, of which each user's last positive event is held out."""

    def make(seed: int) -> Sequences:
        return load_sequences(make_timed(tmp_path / f"last-{seed}", seed), ("click", "save"))

    return make
