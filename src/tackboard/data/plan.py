"""Which events each training step reads: a pure function, not a position in a stream.

In: where each user's training events lie, the seed, the segment length, the token budget. Out: step number → segments.
Histories are cut into segments from their newest end. Epoch e visits the segments in a permutation keyed by
(seed, e). The epoch's steps cut that order into runs of nearly equal token counts, none above the budget. So any
process can compute step 1,000,003 without having seen the steps before it, with any number of workers.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.errors import ConfigError

ORDER_STREAM = 11
"""Keeps the order's random numbers apart from every other use of the seed."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of consecutive events of one user: `starts`, `lengths` and `users` [G], as indices into the sequences."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    users: NDArray[np.int64]


def cut_segments(begins: NDArray[np.int64], ends: NDArray[np.int64], max_length: int) -> Segments:
    """Cuts each user's events [begin, end) into segments of `max_length`, the oldest one taking the remainder."""
    counts = -(-(ends - begins) // max_length)
    users = np.repeat(np.arange(len(begins), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    from_newest = counts[users] - 1 - (np.arange(len(users)) - first[users])
    stops = ends[users] - from_newest * max_length
    starts = np.maximum(begins[users], stops - max_length)
    return Segments(starts=starts, lengths=stops - starts, users=users)


class StepPlan:
    """Step number → positions of its segments. Steps of all epochs are numbered through."""

    def __init__(self, lengths: NDArray[np.int64], *, tokens_per_step: int, seed: int) -> None:
        longest = int(lengths.max(initial=0))
        if tokens_per_step < 2 * longest:
            raise ConfigError(
                f"data.tokens_per_step = {tokens_per_step}",
                allowed=f"allowed: at least {2 * longest}, twice the longest segment",
                fix="raise data.tokens_per_step or lower data.max_length",
            )
        self._lengths = lengths
        self._seed = seed
        # A step's last segment may start just below its cut, so the cuts leave room for the longest segment.
        total = int(lengths.sum())
        self.steps_per_epoch = max(1, -(-total // (tokens_per_step - longest)))
        self._epoch_order = functools.lru_cache(maxsize=2)(self._order_of_epoch)

    def segments_of(self, step: int) -> NDArray[np.int64]:
        """Positions of the segments that step `step` (0-based) reads, in order."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order, bounds = self._epoch_order(epoch)
        return order[bounds[within] : bounds[within + 1]]

    def _order_of_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = keyed_random.permutation(len(self._lengths), self._seed, ORDER_STREAM, epoch)
        tokens_before = np.cumsum(self._lengths[order]) - self._lengths[order]
        total = int(self._lengths.sum())
        cuts = np.arange(self.steps_per_epoch + 1) * total / self.steps_per_epoch
        return order, np.searchsorted(tokens_before, cuts)

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        state.pop("_epoch_order")
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch_order = functools.lru_cache(maxsize=2)(self._order_of_epoch)
