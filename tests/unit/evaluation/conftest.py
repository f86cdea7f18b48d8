"""Two kinds of logs. One is small enough to rank by hand: items A to D, three users with a history, two without.

The other kind is for a cut in time. It has events that were received late, events of one instant, users on one side of
the cut only, and items that appear after the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


START_MS = 1_700_000_000_000
CUT_MS = START_MS + 60 * HOUR_MS
NUM_OLD, NUM_ITEMS = 15, 25
"""Items 0 to 14 appear at once; the others only after the cut."""


def timed_log(seed: int, seed_after: int | None = None) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Events of 26 users in 100 hours, and when they were received.

    What happened or was received at or after the cut depends on `seed_after` alone.
    """
    draws, later = np.random.default_rng(seed), np.random.default_rng(seed + 1000 if seed_after is None else seed_after)
    events: list[tuple[Any, ...]] = [(99, item, "click", "home", START_MS) for item in range(NUM_OLD)]
    received = [START_MS] * NUM_OLD

    def add(user: int, item: int, draw: float, time_ms: int, late_ms: int) -> None:
        events.append((user, item, "hide" if draw < 0.2 else "save" if draw < 0.4 else "click", "home", time_ms))
        received.append(time_ms + late_ms)

    for user in range(25):
        if user % 5 != 1:  # the others have no event before the cut
            for hour in draws.integers(1, 60, draws.integers(3, 12)).tolist():
                late_ms = int(draws.integers(1, 30) * HOUR_MS) if draws.random() < 0.2 else 0
                time_ms = START_MS + hour * HOUR_MS
                item, kind = int(draws.random() ** 2 * NUM_OLD), draws.random()
                if time_ms + late_ms >= CUT_MS:
                    item, kind = int(later.integers(NUM_OLD)), later.random()
                add(user, item, kind, time_ms, late_ms)
        if user % 5 != 0:  # the others have no event after the cut
            for hour in later.integers(0, 40, later.integers(1, 7)).tolist():
                late_ms = int(later.integers(1, 30) * HOUR_MS) if later.random() < 0.2 else 0
                add(user, int(later.integers(NUM_ITEMS)), later.random(), CUT_MS + hour * HOUR_MS, late_ms)
    return events, received


@pytest.fixture
def by_time(tmp_path: Path, make_dataset: Callable[..., Path]) -> Callable[..., Sequences]:
    """`by_time(seed, seed_after=…, slice_hours=…)`: the sequences of a `timed_log`, cut after 60 hours."""

    def make(seed: int, seed_after: int | None = None, slice_hours: float = 0.0) -> Sequences:
        events, received = timed_log(seed, seed_after)
        root = tmp_path / f"{seed}-{seed_after}-{slice_hours}"
        split = TimeSplit(until_ms=CUT_MS - round(slice_hours * HOUR_MS), cut_ms=CUT_MS)
        return load_sequences(
            make_dataset(root, events, received_ms=received), ("click", "save"), time_split=lambda _dataset: split
        )

    return make


@pytest.fixture
def last_out(tmp_path: Path, make_dataset: Callable[..., Path]) -> Callable[..., Sequences]:
    """`last_out(seed)`: the same log without a cut, of which each user's last positive event is held out."""

    def make(seed: int) -> Sequences:
        events, received = timed_log(seed)
        return load_sequences(make_dataset(tmp_path / f"last-{seed}", events, received_ms=received), ("click", "save"))

    return make
