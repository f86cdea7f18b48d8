"""Negatives drawn uniformly from the catalogue, beside those that a batch holds anyway.

In: a window, whose batches name the distinct items of their events. Out: the same batches with further items. Items of
a batch come as often as they are popular, so most of the catalogue is hardly ever among them; a uniform draw reaches
all of it. Each draw is a function of (seed, epoch, window, place), so every rank and a resumed run draw the same.
Decided: drawn with replacement, repeats dropped; what a loss has to know is the chance of an item to be there at all,
1 − (1 − 1/V)^K, and that is exact. As many draws as items, or more, mean the catalogue itself: an exact softmax.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import with_items
from tackboard.batch.items import ItemTable
from tackboard.core import keyed_random
from tackboard.data.index import ItemFrequencies
from tackboard.data.steps import BatchWindow

NEGATIVE_STREAM = 13
"""Keeps these random numbers apart from every other use of the seed."""


class UniformNegatives:
    """`count` draws from a catalogue of V items for every step."""

    def __init__(
        self,
        catalogue: NDArray[np.int64],
        count: int,
        hashing: HashConfig,
        frequencies: ItemFrequencies,
        seed: int,
    ) -> None:
        """`catalogue` rises."""
        self._ids = catalogue
        self._hashing = hashing
        self._frequencies = frequencies
        self._seed = seed
        self._all = count >= len(catalogue)
        self._draws = np.arange(count, dtype=np.int64)
        self._rate = 1.0 if self._all else float(-np.expm1(count * np.log1p(-1.0 / len(catalogue))))
        self._catalogue = ItemTable(catalogue, hashing, frequencies.log_share) if self._all else None

    def beside(self, window: BatchWindow[SequenceBatch], epoch: int, number: int) -> _WindowWithNegatives:
        """The window number `number` of an epoch, with negatives in its batches."""
        return _WindowWithNegatives(self, window, epoch, number)

    def add(self, batch: SequenceBatch, *key: int) -> SequenceBatch:
        """`batch` with the negatives of `key`: its distinct items and the drawn ones, sorted and each once."""
        if self._catalogue is not None:
            whole = with_items(batch, self._catalogue)
            kept = {name: getattr(whole, name).clone() for name in ("item_ids", "item_rows", "item_log_q")}
            sampled = torch.arange(len(self._ids))
            return dataclasses.replace(whole, **kept, sampled=sampled, sample_rate=torch.tensor(1.0))
        drawn = np.unique(self._ids[self._drawn(*key)])
        ids = np.union1d(batch.item_ids.numpy(), drawn)
        return dataclasses.replace(
            with_items(batch, ItemTable(ids, self._hashing, self._frequencies.log_share)),
            sampled=torch.from_numpy(ids.searchsorted(drawn)),
            sample_rate=torch.tensor(self._rate),
        )

    def _drawn(self, *key: int) -> NDArray[np.int64]:
        upper = keyed_random.bits(self._seed, NEGATIVE_STREAM, *key, self._draws) >> np.uint64(32)
        return np.asarray((upper * np.uint64(len(self._ids))) >> np.uint64(32), dtype=np.int64)


class _WindowWithNegatives:
    def __init__(
        self, negatives: UniformNegatives, window: BatchWindow[SequenceBatch], epoch: int, number: int
    ) -> None:
        self._negatives, self._window, self._key = negatives, window, (epoch, number)

    def batch(self, place: int) -> SequenceBatch:
        """The batch of the window's step number `place`."""
        return self._negatives.add(self._window.batch(place), *self._key, place)
