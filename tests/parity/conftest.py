"""Lets the tests of this folder import the modules that lie beside them, and makes what several of them feed models."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch, make_batch
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT, TIME

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def whole_catalogue() -> SequenceBatch:
    """Histories over 200 items, of which all are drawn as negatives."""
    return histories_over_all_items(0)


def histories_over_all_items(seed: int, num_rows: int = 32) -> SequenceBatch:
    """Histories of up to 19 events over 200 items, each of which occurs; all of them are drawn as negatives."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 20, num_rows)
    count = int(lengths.sum())
    items = np.concatenate([np.arange(200), random.integers(0, 200, count - 200)])
    batch = make_batch(
        history=sequence_column(
            lengths,
            item=Column(ID, items),
            action=Column(INT, random.integers(0, 3, count)),
            surface=Column(INT, random.integers(0, 2, count)),
            time=Column(TIME, np.cumsum(random.integers(0, 10**7, count))),
            gap=Column(INT, random.integers(0, 24, count)),
        ),
        is_positive=random.random(count) < 0.8,
        hashing=HashConfig(num_hashes=1, num_rows=200, method="modulo"),
    )
    request = {"since_last": torch.rand(count) * 1e5}
    return SequenceBatch(
        **(vars(batch) | {"sampled": torch.arange(200), "sample_rate": torch.tensor(1.0), "request": request})
    )
