"""Histories of some users, flat in memory: columns over their events, sorted by user and time, with offsets per user.

`SequenceSource` reads them: a few buckets for a window of training, or the whole dataset for evaluation.
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
    """The place of each of U users among N events. `targets` [U] holds the indices of the held-out events, or -1."""

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
        """Holds out each user's last positive event; with `held_out` 2 the one before, and so on; 0 holds out none."""
        targets = np.full(len(user_ids), -1, dtype=np.int64)
        if held_out:
            targets = positive_from_last(offsets, is_positive, held_out)
        return cls(user_ids=user_ids, offsets=offsets, is_positive=is_positive, targets=targets)

    @property
    def train_ends(self) -> NDArray[np.int64]:
        """Index at which each user's training events end [U]."""
        return np.where(self.targets >= 0, self.targets, self.offsets[1:])

    def training_events(self) -> NDArray[np.int64]:
        """Returns the indices of the events that training may see, user after user."""
        return ranges(self.offsets[:-1], self.train_ends - self.offsets[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(UserRanges):
    """Histories of U users, N events in all.

    `events` holds the columns that the features of the source read. `request` holds the features of the request just
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
    def _history(self) -> Program:
        return Program(self.source.features.plan.trimmed([HISTORY]))

    def histories(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Column:
        """Computes `history` of runs of events: `lengths` events from index `starts` on, as if nothing came before.

        A feature `history` that drops events of a run raises ConfigError, because training predicts all events of the
        run.
        """
        return self.histories_of(ranges(starts, lengths), offsets_of(lengths))

    def histories_of(self, chosen: NDArray[np.int64], offsets: NDArray[np.int64]) -> Column:
        """Computes `history` of any events: row r has the events chosen[offsets[r]:offsets[r + 1]], oldest first."""
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
    """Returns the index of each user's last positive event [U], or of the positive event `number` - 1 places before.

    A user with fewer than `number` positive events gets the first of them, because with -1 training would see events
    that a test predicts. A user without positive events gets -1.
    """
    positions = np.flatnonzero(is_positive)
    begins, ends = np.searchsorted(positions, offsets[:-1]), np.searchsorted(positions, offsets[1:])
    found = np.full(len(offsets) - 1, -1, dtype=np.int64)
    some = ends > begins
    found[some] = positions[np.maximum(begins, ends - number)[some]]
    return found
