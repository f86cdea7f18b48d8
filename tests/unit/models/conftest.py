"""Batches of made-up histories, and a small PinFM to feed them to."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core.config import from_dict
from tackboard.core.keyed_random import uniform
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.index import ItemFrequencies
from tackboard.features.column import Column
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig

VOCABULARY = Vocabulary(actions=("click", "hide", "save"), surfaces=("home", "search"))
HASHING = HashConfig(num_hashes=3, num_rows=32)


def histories(
    make_history: Callable[..., Column], lengths: list[int], users: list[int] | None = None, seed: int = 0
) -> SequenceBatch:
    """Histories of items 0 to 11; about two events in three are positive."""
    events = np.arange(sum(lengths))
    draw = uniform(seed, events[:, None], np.arange(4))
    items = (draw[:, 0] * 12).astype(np.int64) - 3
    return make_batch(
        history=make_history(
            lengths,
            items,
            (draw[:, 1] * 4).astype(np.int64),
            (draw[:, 2] * 3).astype(np.int64),
            np.cumsum(draw[:, 3] * 1e6).astype(np.int64),
        ),
        users=np.array(users if users is not None else range(len(lengths)), dtype=np.int64),
        is_positive=draw[:, 1] > 1 / 3,
        hashing=HASHING,
        log_q=ItemFrequencies.of(items).log_share,
    )


@pytest.fixture
def make_histories(make_history: Callable[..., Column]) -> Callable[..., SequenceBatch]:
    """`make_histories(lengths, users=None, seed=0)`."""
    return functools.partial(histories, make_history)


@pytest.fixture
def make_model() -> Callable[..., PinFM]:
    """`make_model(width=16, backbone={…}, …)`: a PinFM with parameters of one fixed seed, in evaluation mode."""

    def make(**settings: object) -> PinFM:
        torch.manual_seed(0)
        tables = TableConfig(num_hashes=HASHING.num_hashes, num_rows=HASHING.num_rows, dim=4)
        values = {"tables": tables, "width": 16, "max_history": 10, **settings}
        return from_dict(PinFMConfig, values).build(VOCABULARY).eval()

    return make
