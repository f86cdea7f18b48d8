"""Histories of some users, flat in memory: columns over their events, sorted by user and time, with offsets per user.

`SequenceSource` makes them, of a few buckets for a window of training, or of the whole dataset for evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import ConfigError
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
    """The place of the events of U users among N events. `targets` [U] are the held-out events, or -1."""

    user_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    is_positive: NDArray[np.bool_]
    targets: NDArray[np.int64]

    @classmethod
    def cut(
        cls,
        *,
        user_ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        is_positive: NDArray[np.bool_],
        held_out: int,
    ) -> UserRanges:
        """Holds out each user's last positive event; with `held_out` 2 the event before it, and so on; 0: none."""
        targets = np.full(len(user_ids), -1, dtype=np.int64)
        if held_out:
            targets = positive_from_last(offsets, is_positive, held_out)
        return cls(user_ids=user_ids, offsets=offsets, is_positive=is_positive, targets=targets)

    @property
    def train_ends(self) -> NDArray[np.int64]:
        """Where each user's training events end [U], as an index into the events."""
        return np.where(self.targets >= 0, self.targets, self.offsets[1:])

    def training_events(self) -> NDArray[np.int64]:
        """Indices of the events that training may see, user after user."""
        return ranges(self.offsets[:-1], self.train_ends - self.offsets[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(UserRanges):
    """Histories of U users, N events in all.

    `events` are the columns that the source's features read, `request` the features of the request just before each
    event [N].
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
    def _history(self) -> Program:
        return Program(self.source.features.plan.trimmed([HISTORY]))

    def histories(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Column:
        """The feature `history` of runs of events: `lengths` events from index `starts` on, as if nothing came before.

        A run must stay whole, because training predicts its events: a `history` that drops some raises ConfigError.
        """
        return self.histories_of(ranges(starts, lengths), offsets_of(lengths))

    def histories_of(self, chosen: NDArray[np.int64], offsets: NDArray[np.int64]) -> Column:
        """`histories` of any choice of events: those of row r are chosen[offsets[r]:offsets[r + 1]], oldest first."""
        num_rows = len(offsets) - 1
        frame = Frame(
            num_requests=num_rows,
            num_candidates=0,
            request_of=None,
            request_ms=None,
            event_times=self.events.times.take(chosen),
            visible=View(None, offsets[:-1], offsets[1:], np.arange(num_rows), offsets),
            columns={("event", name): column.take(chosen) for name, column in self.events.columns.items()},
        )
        column = self._history.run(frame)[HISTORY]
        kept = next(iter((column.fields or {}).values())).offsets
        if kept is None or not np.array_equal(kept, offsets):
            raise ConfigError(
                "the feature history leaves out events that training would predict",
                allowed="allowed: all columns of events.newest(n), with n of data.max_length or more",
            )
        return column


def positive_from_last(
    offsets: NDArray[np.int64], is_positive: NDArray[np.bool_], number: int = 1
) -> NDArray[np.int64]:
    """Index of each user's last positive event [U], or of the positive event `number` - 1 places before it.

    A user with at least one but fewer than `number` is cut at the first positive event: -1 would give tested events to
    training. A user without positive events has -1.
    """
    positions = np.flatnonzero(is_positive)
    begins, ends = np.searchsorted(positions, offsets[:-1]), np.searchsorted(positions, offsets[1:])
    found = np.full(len(offsets) - 1, -1, dtype=np.int64)
    some = ends > begins
    found[some] = positions[np.maximum(begins, ends - number)[some]]
    return found
