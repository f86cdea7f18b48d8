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

from tackboard.batch import HashConfig, SequenceBatch, item_rows
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
        if self._all:
            self._rows = item_rows(catalogue, hashing)
            self._log_q = torch.from_numpy(frequencies.log_share(catalogue))

    def beside(self, window: BatchWindow[SequenceBatch], epoch: int, number: int) -> _WindowWithNegatives:
        """The window number `number` of an epoch, with negatives in its batches."""
        return _WindowWithNegatives(self, window, epoch, number)

    def add(self, batch: SequenceBatch, *key: int) -> SequenceBatch:
        """`batch` with the negatives of `key`: its distinct items and the drawn ones, sorted and each once."""
        if self._all:
            items = torch.from_numpy(self._ids.searchsorted(batch.item_ids.numpy())).take(batch.items)
            return dataclasses.replace(
                batch,
                items=items,
                item_ids=torch.from_numpy(self._ids.copy()),
                item_rows=self._rows.clone(),
                item_log_q=self._log_q.clone(),
                sampled=torch.arange(len(self._ids)),
                sample_rate=torch.tensor(1.0),
            )
        drawn = np.unique(self._ids[self._drawn(*key)])
        own = batch.item_ids.numpy()
        ids = np.union1d(own, drawn)
        return dataclasses.replace(
            batch,
            items=torch.from_numpy(ids.searchsorted(own)).take(batch.items),
            item_ids=torch.from_numpy(ids),
            item_rows=item_rows(ids, self._hashing),
            item_log_q=torch.from_numpy(self._frequencies.log_share(ids)),
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
