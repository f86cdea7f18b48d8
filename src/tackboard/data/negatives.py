"""Draws negatives uniformly from the catalogue, in addition to the items of a batch.

This module takes a batch with the distinct items of its events and returns the same batch with additional items.
Most events of a batch have popular items, so most items of the catalogue are hardly ever in a batch. A uniform draw
reaches all items. The seed and the step determine the draws, so all ranks and a resumed run draw the same items.
Decided: K draws from V items are made with replacement, and repeats are dropped. A loss needs the probability that an
item is drawn at least once; this probability is exactly 1 − (1 − 1/V)^K. If K is V or more, the whole catalogue is
taken, which makes an exact softmax possible.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import with_items
from tackboard.batch.items import ItemTable
from tackboard.core import keyed_random

NEGATIVE_STREAM = 13
"""Random stream of the draws of negatives, separate from all other uses of the seed."""


class Frequencies(Protocol):
    """Knows each item's share of the training events."""

    def log_share(self, item_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log of the share of each item."""


class UniformNegatives:
    """Makes `count` draws from a catalogue of V items for every step."""

    def __init__(
        self,
        catalogue: NDArray[np.int64] | range,
        count: int,
        hashing: HashConfig,
        frequencies: Frequencies,
        seed: int,
    ) -> None:
        """`catalogue` is in ascending order. It may be a range from 0 on, if an array of all ids would be too large."""
        self._num_items = len(catalogue)
        self._ids = None if isinstance(catalogue, range) else catalogue
        self._hashing = hashing
        self._frequencies = frequencies
        self._seed = seed
        self._all = count >= self._num_items
        self._draws = np.arange(count, dtype=np.int64)
        self._rate = 1.0 if self._all else float(-np.expm1(count * np.log1p(-1.0 / self._num_items)))
        self._catalogue = None
        if self._all:
            self._catalogue = ItemTable(np.asarray(catalogue, dtype=np.int64), hashing, frequencies.log_share)

    def add(self, batch: SequenceBatch, *key: int) -> SequenceBatch:
        """Returns `batch` with the negatives of `key` added to its items, which stay sorted and distinct."""
        if self._catalogue is not None:
            whole = with_items(batch, self._catalogue)
            kept = {name: getattr(whole, name).clone() for name in ("item_ids", "item_rows", "item_log_q")}
            sampled = torch.arange(self._num_items)
            return dataclasses.replace(whole, **kept, sampled=sampled, sample_rate=torch.tensor(1.0))
        places = self._drawn(*key)
        drawn = np.unique(places if self._ids is None else self._ids[places])
        ids = np.union1d(batch.item_ids.numpy(), drawn)
        return dataclasses.replace(
            with_items(batch, ItemTable(ids, self._hashing, self._frequencies.log_share)),
            sampled=torch.from_numpy(ids.searchsorted(drawn)),
            sample_rate=torch.tensor(self._rate),
        )

    def _drawn(self, *key: int) -> NDArray[np.int64]:
        upper = keyed_random.bits(self._seed, NEGATIVE_STREAM, *key, self._draws) >> np.uint64(32)
        return np.asarray((upper * np.uint64(self._num_items)) >> np.uint64(32), dtype=np.int64)
