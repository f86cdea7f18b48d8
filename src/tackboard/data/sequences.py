"""Holds the histories of users as flat columns: one entry per event, sorted by user and time, with offsets per user.

`SequenceSource` reads histories from disk: a few buckets for a training window, or the whole dataset for evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import ConfigError
from tackboard.data.time_split import TimeSplit, UserCuts
from tackboard.features.column import Column, offsets_of, ranges
from tackboard.features.entity_tables import EventTable
from tackboard.features.execution import Program
from tackboard.features.frame import Frame
from tackboard.features.standard import HISTORY
from tackboard.features.views import View

if TYPE_CHECKING:
    from tackboard.data.source import SequenceSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserRanges:
    """Says which of N events belong to each of U users. `targets` [U] holds the index of the held-out event, or -1.

    There are targets only with leave-last-out. With a split by time, evaluation chooses which events to judge
    (evaluation/judged_events.py).
    """

    user_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    is_positive: NDArray[np.bool_]
    targets: NDArray[np.int64]
    cuts: UserCuts | None = None
    """Where training begins and ends, if instants decide it. If None, training reads all events before the target."""

    @classmethod
    def cut(
        cls,
        *,
        user_ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        is_positive: NDArray[np.bool_],
        held_out: int,
    ) -> UserRanges:
        """Holds out each user's last positive event if `held_out` is 1, the second last if it is 2, none if it is 0."""
        targets = np.full(len(user_ids), -1, dtype=np.int64)
        if held_out:
            targets = positive_from_last(offsets, is_positive, held_out)
        return cls(user_ids=user_ids, offsets=offsets, is_positive=is_positive, targets=targets)

    def cut_in_time(
        self,
        times: NDArray[np.int64],
        received: NDArray[np.int64],
        split: TimeSplit | None,
        predict_from_ms: int | None,
    ) -> UserRanges:
        """Returns the same ranges with cuts at instants. With a split by time, all targets are -1 (no event)."""
        targets = self.targets if split is None else np.full_like(self.targets, -1)
        last_ends = dataclasses.replace(self, targets=targets).train_ends
        cuts = UserCuts.find(self.offsets, times, received, split, predict_from_ms, last_ends)
        return dataclasses.replace(self, targets=targets, cuts=cuts)

    @property
    def train_ends(self) -> NDArray[np.int64]:
        """Index at which each user's training events end [U]."""
        if self.cuts is not None:
            return self.cuts.train_ends
        return np.where(self.targets >= 0, self.targets, self.offsets[1:])

    def training_events(self) -> NDArray[np.int64]:
        """Returns the indices of the events that training may see, user after user."""
        return ranges(self.offsets[:-1], self.train_ends - self.offsets[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(UserRanges):
    """Holds the histories of U users, with N events in total.

    `events` holds the columns that the features of the source read. `request` holds the features of a request just
    before each event [N].
    """

    source: SequenceSource
    item_ids: NDArray[np.int64]
    events: EventTable
    request: Mapping[str, Column]

    @property
    def catalogue(self) -> NDArray[np.int64]:
        """Ids of all items of the dataset, sorted."""
        return self.source.catalogue

    @functools.cached_property
    def item_places(self) -> NDArray[np.int64]:
        """Position in the catalogue of the item of each event [N]."""
        return np.searchsorted(self.catalogue, self.item_ids)

    @property
    def known_at(self) -> NDArray[np.int64]:
        """When each event was known [N]: its time, or the time at which it was received if that is later."""
        return np.maximum(self.events.times, self.events.received)

    @functools.cached_property
    def _history(self) -> Program:
        return Program(self.source.features.plan.trimmed([HISTORY]))

    def histories(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Column:
        """Computes the feature `history` of ranges of events. Range r has lengths[r] events from index starts[r] on.

        Events before a range are ignored. Raises ConfigError if the feature drops events of a range, because training
        predicts all events of the range.
        """
        return self.histories_of(ranges(starts, lengths), offsets_of(lengths))

    def histories_of(self, chosen: NDArray[np.int64] | None, offsets: NDArray[np.int64]) -> Column:
        """Computes the feature `history`. Row r has the events chosen[offsets[r]:offsets[r + 1]], oldest first.

        If `chosen` is None, all events are chosen, in their order, and nothing is copied.
        """
        num_rows = len(offsets) - 1
        times, columns = self.events.times, self.events.columns
        if chosen is not None:
            times, columns = times.take(chosen), {name: column.take(chosen) for name, column in columns.items()}
        frame = Frame(
            num_requests=num_rows,
            num_candidates=0,
            request_of=None,
            request_ms=None,
            event_times=times,
            visible=View(None, offsets[:-1], offsets[1:], np.arange(num_rows), offsets),
            columns={("event", name): column for name, column in columns.items()},
        )
        column = self._history.run(frame)[HISTORY]
        kept = next(iter((column.fields or {}).values())).offsets
        if kept is None or not np.array_equal(kept, offsets):
            raise ConfigError(
                "the feature history leaves out events that training would predict",
                allowed="allowed: all columns of events.newest(n), where n is at least data.max_length",
            )
        return column


def positive_from_last(
    offsets: NDArray[np.int64], is_positive: NDArray[np.bool_], number: int = 1
) -> NDArray[np.int64]:
    """Returns the index of each user's `number`-th positive event [U], counted from the last, which is number 1.

    For a user with fewer than `number` positive events, returns the first of them. With -1, nothing of this user would
    be held out, and training would see the event that the test predicts. Without positive events, returns -1.
    """
    positions = np.flatnonzero(is_positive)
    bounds = positions.searchsorted(offsets)
    begins, ends = bounds[:-1], bounds[1:]
    found = np.full(len(offsets) - 1, -1, dtype=np.int64)
    some = ends > begins
    found[some] = positions[np.maximum(begins, ends - number)[some]]
    return found
