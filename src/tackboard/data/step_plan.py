"""Computes what each training step reads, as a pure function of the step number and not as a position in a stream.

This module takes the number of tokens in each bucket of the dataset, the seed and the token budget, and maps a step
number to units. A unit is a segment of a history, or a request with its candidates, and is never split. Epoch e visits
the buckets in a permutation keyed by (seed, e). Buckets that are visited together form a window. The units of a window
are permuted as well, and the permuted units are cut into steps. The steps have nearly equal numbers of tokens, and none
exceeds the budget.

    epoch      bucket 7 │ 2 │ 5  ║  0 │ 6 │ 3  ║  4 │ 1        windows of up to three buckets
    steps      0 │ 1 │ 2 │ 3     ║  4 │ 5 │ 6  ║  7 │ 8        each within one window

So any process can compute step 1,000,003 without the steps before it, with any number of workers and processes. The
process needs only the inputs named above. Decided: a step never takes units from two windows. This rule costs at most
one more step per window, but windows can be prepared independently of each other.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.errors import ConfigError
from tackboard.features.column import offsets_of

ORDER_STREAM = 11
"""Random stream of the order of units, separate from all other uses of the seed."""
BUCKET_STREAM = 12
"""Random stream of the order of buckets."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Holds G ranges of consecutive events, each of one user. `starts` holds indices of events, `users` of users."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    users: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Segments:
        """Returns the segments with the indices `chosen`, in the order of `chosen`."""
        return Segments(self.starts[chosen], self.lengths[chosen], self.users[chosen])


def cut_segments(
    begins: NDArray[np.int64], ends: NDArray[np.int64], max_length: int, *, newest_only: bool = False
) -> Segments:
    """Cuts each user's events [begin, end) into segments of `max_length` events; the oldest segment may be shorter.

    If `newest_only` is True, only the newest segment of each user is returned.
    """
    if newest_only:
        begins = np.maximum(begins, ends - max_length)
    counts = -(-(ends - begins) // max_length)
    users = np.repeat(np.arange(len(begins), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    from_newest = counts[users] - 1 - (np.arange(len(users)) - first[users])
    stops = ends[users] - from_newest * max_length
    starts = np.maximum(begins[users], stops - max_length)
    return Segments(starts=starts, lengths=stops - starts, users=users)


def runs_of_all(segments: Segments, num_events: int, max_length: int) -> NDArray[np.int64]:
    """Cuts events 0 to `num_events` - 1 into ranges ("runs") of at most `max_length` events, and returns their offsets.

    Each segment becomes one run. The events between the segments, which are not trained on, become further runs.
    `segments` must be in ascending order.
    """
    begins = np.append(0, segments.starts + segments.lengths)
    others = cut_segments(begins, np.append(segments.starts, num_events), max_length)
    return np.append(np.sort(np.concatenate([segments.starts, others.starts])), num_events)


class StepPlan:
    """Maps a step number to its epoch, window and place in the window. Step numbers continue from epoch to epoch."""

    def __init__(
        self,
        bucket_tokens: NDArray[np.int64],
        *,
        longest: int,
        tokens_per_step: int,
        seed: int,
        buckets_per_window: int,
        longest_setting: str = "data.max_length",
    ) -> None:
        """`bucket_tokens` [G] holds the number of tokens in each bucket; no unit has more than `longest` tokens.

        `longest_setting` names the setting that limits the length of units, for the error message.
        """
        if tokens_per_step < 2 * longest:
            raise ConfigError(
                f"data.tokens_per_step = {tokens_per_step} is too small",
                allowed=f"allowed: at least {2 * longest}, twice the tokens of the longest segment or request",
                fix=f"raise data.tokens_per_step, or lower {longest_setting}",
            )
        self._bucket_tokens = bucket_tokens
        self._seed = seed
        # The last unit of a step may begin just before the cut, so the cuts leave room for the longest unit.
        self._tokens_per_cut = max(1, tokens_per_step - longest)
        self.total_tokens = int(bucket_tokens.sum())
        self.num_windows = -(-len(bucket_tokens) // buckets_per_window)
        # The sizes of windows differ by at most one bucket, because a small last window would give small steps.
        self._window_starts = np.arange(self.num_windows + 1) * len(bucket_tokens) // max(1, self.num_windows)
        self._first_steps = [0]
        self._epoch = functools.lru_cache(maxsize=4)(self._order_of_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of the first epoch. With several windows, later epochs may have a few steps more or less."""
        return self.first_step(1)

    def first_step(self, epoch: int) -> int:
        """Returns the number of an epoch's first step."""
        if self.num_windows == 1:
            return epoch * int(self._epoch(0)[1][-1])
        while len(self._first_steps) <= epoch:
            self._know_next_epoch()
        return self._first_steps[epoch]

    def locate(self, step: int) -> tuple[int, int, int]:
        """Returns (epoch, window, place in the window) of step number `step`, all from 0."""
        if self.num_windows == 1:
            epoch, place = divmod(step, self.steps_per_epoch)
            return epoch, 0, place
        while self._first_steps[-1] <= step:
            self._know_next_epoch()
        epoch = bisect.bisect_right(self._first_steps, step) - 1
        within = step - self._first_steps[epoch]
        bounds = self._epoch(epoch)[1]
        window = int(np.searchsorted(bounds, within, side="right")) - 1
        return epoch, window, within - int(bounds[window])

    def _know_next_epoch(self) -> None:
        last = len(self._first_steps) - 1
        self._first_steps.append(self._first_steps[last] + int(self._epoch(last)[1][-1]))

    def buckets_of(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Returns the buckets of a window, in ascending order."""
        order, _ = self._epoch(epoch)
        return np.sort(order[self._window_starts[window] : self._window_starts[window + 1]])

    def deal(
        self,
        epoch: int,
        window: int,
        lengths: NDArray[np.int64],
        rank: int = 0,
        world_size: int = 1,
        *,
        owners: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns a rank's units in reading order, and the steps' bounds: step i has units bounds[i]:bounds[i + 1].

        `lengths` holds the number of tokens of each unit of the window, bucket after bucket. If `owners` is given, all
        units of a step with the same owner go to the same rank.
        """
        # Window and epoch form one key. A single window has number 0, and then the key equals the epoch.
        order = keyed_random.permutation(len(lengths), self._seed, ORDER_STREAM, (window << 32) | epoch)
        ordered = lengths[order]
        first, last = self._epoch(epoch)[1][window : window + 2]
        cuts = np.arange(last - first + 1) * int(ordered.sum()) / max(1, last - first)
        bounds = np.searchsorted(np.cumsum(ordered) - ordered, cuts)
        if world_size == 1:
            return order, bounds
        owned = None if owners is None else owners[order]
        shares = [
            begin + share_of_rank(ordered[begin:end], rank, world_size, None if owned is None else owned[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ]
        return order[np.concatenate(shares)], offsets_of(np.array([len(share) for share in shares], dtype=np.int64))

    def _order_of_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the buckets in the epoch's order, and each window's first step, counted from the epoch's start."""
        order = keyed_random.permutation(len(self._bucket_tokens), self._seed, BUCKET_STREAM, epoch)
        tokens = np.add.reduceat(self._bucket_tokens[order], self._window_starts[:-1])
        steps = -(-tokens // self._tokens_per_cut)
        return order, offsets_of(np.maximum(steps, 1) if self.num_windows == 1 else steps)

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        state.pop("_epoch")
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = functools.lru_cache(maxsize=4)(self._order_of_epoch)


def share_of_rank(
    lengths: NDArray[np.int64], rank: int, world_size: int, owners: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Returns the positions of the units of a step that the process `rank` computes, in ascending order.

    The longest units are dealt first, each to the process with the fewest tokens so far. So the processes, which wait
    for each other, have nearly equal work. A step with fewer units than processes gives some processes an empty share.
    If `owners` is given, the units of an owner are dealt together.
    """
    if owners is not None:
        distinct, group = np.unique(owners, return_inverse=True)
        totals = np.bincount(group, weights=lengths, minlength=len(distinct)).astype(np.int64)
        return np.flatnonzero(np.isin(group, share_of_rank(totals, rank, world_size)))
    loads = [(0, other) for other in range(world_size)]
    mine = []
    for position in np.argsort(-lengths, kind="stable").tolist():
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + int(lengths[position]), owner))
        if owner == rank:
            mine.append(position)
    return np.sort(np.array(mine, dtype=np.int64))
