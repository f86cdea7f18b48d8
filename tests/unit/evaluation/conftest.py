"""A log small enough to rank by hand: items A to D, three users with a history, two without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences

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
