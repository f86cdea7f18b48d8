"""Counts the positive events of each item in a window that ends at a given instant: how popular an item is right now.

An event counts from the instant after it was known. It was known when it happened or, if that is later, when the log
received it. So a count at time t holds only what a server could have counted at t. The events are sorted once, by the
time at which they were known. A window keeps its counts and moves its two ends. So if instants come in rising order,
each call adds and removes only the events that entered and left the window since the last call.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tackboard.data.sequences import Sequences


@dataclasses.dataclass(frozen=True)
class LiveCounts:
    """The positive events of all users, sorted by the time at which they were known. Items are positions 0 to V − 1."""

    items: NDArray[np.int64]
    times: NDArray[np.int64]
    num_items: int

    @classmethod
    def of(cls, sequences: Sequences) -> LiveCounts:
        """Returns all positive events of `sequences`. A window counts only the events before its end."""
        chosen = sequences.is_positive
        return cls.sort(sequences.item_places[chosen], sequences.known_at[chosen], len(sequences.catalogue))

    @classmethod
    def sort(cls, items: NDArray[np.int64], known_at: NDArray[np.int64], num_items: int) -> LiveCounts:
        """Returns the given positive events."""
        order = np.argsort(known_at, kind="stable")
        return cls(items[order], known_at[order], num_items)

    def window(self, length_ms: int) -> CountWindow:
        """Returns a window of this length."""
        return CountWindow(self, length_ms)


class CountWindow:
    """The counts of a window of one length, which moves from instant to instant."""

    def __init__(self, counts: LiveCounts, length_ms: int) -> None:
        self._counts, self._length_ms = counts, length_ms
        self._begin = self._end = 0
        self._numbers = np.zeros(counts.num_items, dtype=np.float32)

    def at(self, time_ms: int) -> NDArray[np.float32]:
        """Returns the number of each item's events [V] that were known in [`time_ms` − length, `time_ms`).

        The array is the window's own: it changes with the next call.
        """
        times = self._counts.times
        begin, end = np.searchsorted(times, (time_ms - self._length_ms, time_ms)).tolist()
        if begin < self._begin or begin > self._end:
            self._numbers[:] = 0.0
            self._begin = self._end = begin
        self._add(self._end, end, 1.0)
        self._add(self._begin, begin, -1.0)
        self._begin, self._end = begin, end
        return self._numbers

    def _add(self, first: int, last: int, sign: float) -> None:
        """Adds the events from `first` to `last`, or takes them away if `last` is smaller."""
        if last < first:
            first, last, sign = last, first, -sign
        np.add.at(self._numbers, self._counts.items[first:last], np.float32(sign))
