"""Defines the two baselines that every model must beat: popularity, and co-occurrence with the user's recent items.

Both count training events only. Their method `score` returns scores over the catalogue for some users at a time.
`ItemToItem` scores items by cosine co-occurrence. Two items co-occur if they are within `WINDOW` events of each other
in one history. Each item keeps its `NUM_NEIGHBOURS` strongest neighbours. The score of an item for a user is the sum of
its co-occurrences with the user's last `NUM_RECENT` items. Each step back in the history multiplies the weight by
`DECAY`. Counting is done by sorting, so memory grows with the events and never with items × items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tackboard.data.sequences import Sequences

WINDOW = 5
NUM_NEIGHBOURS = 100
NUM_RECENT = 10
DECAY = 0.8


class Popularity:
    """Scores an item by its number of positive training events."""

    def __init__(self, sequences: Sequences) -> None:
        events = sequences.training_events()
        events = events[sequences.is_positive[events]]
        columns = np.searchsorted(sequences.catalogue, sequences.item_ids[events])
        self.counts = np.bincount(columns, minlength=len(sequences.catalogue)).astype(np.float32)

    def score(self, users: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns scores [U, catalogue], which are the same for all of `users`."""
        return np.broadcast_to(self.counts, (len(users), len(self.counts))).copy()


class ItemToItem:
    """Scores an item by its cosine co-occurrence with the user's most recent items."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        events = sequences.training_events()
        num_items = len(sequences.catalogue)
        items = np.searchsorted(sequences.catalogue, sequences.item_ids[events])
        users = np.repeat(np.arange(len(sequences.user_ids)), np.diff(sequences.offsets))[events]
        pairs = [
            items[:-gap][same] * num_items + items[gap:][same]
            for gap in range(1, WINDOW + 1)
            for same in [users[:-gap] == users[gap:]]
        ]
        both_ways = np.concatenate([np.concatenate(pairs), _transposed(np.concatenate(pairs), num_items)])
        keys, counts = np.unique(both_ways, return_counts=True)
        left, right = keys // num_items, keys % num_items
        occurrences = np.bincount(items, minlength=num_items).astype(np.float64)
        strength = counts / np.sqrt(np.maximum(1.0, occurrences[left] * occurrences[right]))
        strength[left == right] = 0.0
        self._keep_strongest(left, right, strength, num_items)

    def _keep_strongest(
        self, left: NDArray[np.int64], right: NDArray[np.int64], strength: NDArray[np.float64], num_items: int
    ) -> None:
        order = np.lexsort((right, -strength, left))
        left, right, strength = left[order], right[order], strength[order]
        starts = np.searchsorted(left, np.arange(num_items))
        kept = np.arange(len(left)) - starts[left] < NUM_NEIGHBOURS
        self._neighbours = right[kept]
        self._strengths = strength[kept].astype(np.float32)
        self._starts = np.searchsorted(left[kept], np.arange(num_items + 1))

    def score(self, users: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns scores [U, catalogue] for `users` (positions), from their histories before the held-out event."""
        scores = np.zeros((len(users), len(self.sequences.catalogue)), dtype=np.float32)
        for row, user in enumerate(users):
            begin, end = self.sequences.offsets[user], self.sequences.train_ends[user]
            recent = self.sequences.item_ids[max(begin, end - NUM_RECENT) : end][::-1]
            for age, item in enumerate(np.searchsorted(self.sequences.catalogue, recent)):
                neighbours = slice(self._starts[item], self._starts[item + 1])
                scores[row, self._neighbours[neighbours]] += DECAY**age * self._strengths[neighbours]
        return scores


def _transposed(keys: NDArray[np.int64], num_items: int) -> NDArray[np.int64]:
    return (keys % num_items) * num_items + keys // num_items
