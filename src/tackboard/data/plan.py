"""Which segments each training step reads: a pure function, not a position in a stream.

In: how many tokens lie in each bucket of the dataset, the seed, the token budget. Out: step number → parts of windows.
Histories are cut into segments from their newest end. Epoch e visits the buckets in a permutation keyed by (seed, e),
some of them at a time, a window; inside a window the segments are permuted again. The epoch's steps cut that order
into runs of nearly equal token counts, none above the budget, without regard to where a window ends:

    epoch     bucket 7 │ 2 │ 5 ║ 0 │ 6 │ 3 ║ 4 │ 1            windows of three buckets, in memory one at a time
    steps     ├── 0 ──┼── 1 ──┼── 2 ──┼── 3 ──┼── 4 ──┤      step 1 ends one window and begins the next

So any process can compute step 1,000,003 without having seen the steps before it, with any number of workers and
processes, and needs to know of the dataset only one number per bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.errors import ConfigError, DataError

ORDER_STREAM = 11
"""Keeps the random numbers of the order of segments apart from every other use of the seed."""
BUCKET_STREAM = 12
"""The same for the order of buckets."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of consecutive events of one user: `starts`, `lengths` and `users` [G], as indices into the sequences."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    users: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Segments:
        """Some of the segments, in the order given."""
        return Segments(self.starts[chosen], self.lengths[chosen], self.users[chosen])


def cut_segments(begins: NDArray[np.int64], ends: NDArray[np.int64], max_length: int) -> Segments:
    """Cuts each user's events [begin, end) into segments of `max_length`, the oldest one taking the remainder."""
    counts = -(-(ends - begins) // max_length)
    users = np.repeat(np.arange(len(begins), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    from_newest = counts[users] - 1 - (np.arange(len(users)) - first[users])
    stops = ends[users] - from_newest * max_length
    starts = np.maximum(begins[users], stops - max_length)
    return Segments(starts=starts, lengths=stops - starts, users=users)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a step reads of one window: the segments that begin at a token from `first` on and before `last`."""

    epoch: int
    window: int
    first: float
    last: float


class StepPlan:
    """Step number → parts of windows. Steps of all epochs are numbered through."""

    def __init__(
        self,
        bucket_tokens: NDArray[np.int64],
        *,
        longest: int,
        tokens_per_step: int,
        seed: int,
        buckets_per_window: int,
    ) -> None:
        """`bucket_tokens` [G] are the tokens of each bucket's segments, none of which is longer than `longest`."""
        if tokens_per_step < 2 * longest:
            raise ConfigError(
                f"data.tokens_per_step = {tokens_per_step}",
                allowed=f"allowed: at least {2 * longest}, twice the longest segment",
                fix="raise data.tokens_per_step or lower data.max_length",
            )
        self._bucket_tokens = bucket_tokens
        self._seed = seed
        self._buckets_per_window = buckets_per_window
        self.total_tokens = int(bucket_tokens.sum())
        # A step's last segment may start just below its cut, so the cuts leave room for the longest segment.
        self.steps_per_epoch = max(1, -(-self.total_tokens // max(1, tokens_per_step - longest)))
        self.num_windows = -(-len(bucket_tokens) // buckets_per_window)
        self._epoch = functools.lru_cache(maxsize=2)(self._order_of_epoch)

    def buckets_of(self, epoch: int, window: int) -> NDArray[np.int64]:
        """The buckets of a window, rising."""
        order, _ = self._epoch(epoch)
        return np.sort(order[window * self._buckets_per_window : (window + 1) * self._buckets_per_window])

    def order_in(self, epoch: int, window: int, num_segments: int) -> NDArray[np.int64]:
        """The order in which an epoch reads the segments of a window."""
        # One number for both, so that a dataset of one window is read in the order of the epoch alone.
        return keyed_random.permutation(num_segments, self._seed, ORDER_STREAM, (window << 32) | epoch)

    def parts_of(self, step: int) -> list[Part]:
        """What step `step` (0-based) reads, window after window; a part may turn out to hold no segment."""
        epoch, within = divmod(step, self.steps_per_epoch)
        _, bounds = self._epoch(epoch)
        first, last = (cut * self.total_tokens / self.steps_per_epoch for cut in (within, within + 1))
        begin = max(0, int(np.searchsorted(bounds, first, side="right")) - 1)
        end = int(np.searchsorted(bounds, last, side="left"))
        return [
            Part(epoch, window, first - bounds[window], last - bounds[window]) for window in range(begin, max(end, 1))
        ]

    def _order_of_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The buckets in the epoch's order, and the token with which each of its windows begins and the last ends."""
        order = keyed_random.permutation(len(self._bucket_tokens), self._seed, BUCKET_STREAM, epoch)
        starts = np.arange(0, len(order), self._buckets_per_window)
        tokens = np.add.reduceat(self._bucket_tokens[order], starts) if len(order) else np.zeros(0, dtype=np.int64)
        return order, np.append(0, np.cumsum(tokens)).astype(np.int64)

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        state.pop("_epoch")
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = functools.lru_cache(maxsize=2)(self._order_of_epoch)


def share_of_rank(lengths: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """Positions of the segments of a step that one of `world_size` processes computes, rising.

    The longest segments are dealt first, each to the process with the fewest tokens so far, so that the processes,
    which wait for each other, have nearly equal work. Together the shares are the step, whatever the world size.
    """
    if world_size == 1:
        return np.arange(len(lengths), dtype=np.int64)
    if len(lengths) < world_size:
        raise DataError(
            f"a step of {len(lengths)} segments is to be split over {world_size} processes",
            fix="raise data.tokens_per_step, or use fewer processes",
        )
    loads = [(0, other) for other in range(world_size)]
    mine = []
    for position in np.argsort(-lengths, kind="stable").tolist():
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + int(lengths[position]), owner))
        if owner == rank:
            mine.append(position)
    return np.sort(np.array(mine, dtype=np.int64))
