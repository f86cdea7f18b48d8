"""Chooses the events that an evaluation predicts, and says what a ranking knows about each of them.

Leave-last-out has one event per user, the held-out event. With a split by time, all positive events from the cut on can
be judged: each user's first, each user's last, or all. The history of a judged event is all of the user's events before
it, also those after the cut, because a server would know them. Only the model and the frozen baselines stop at the cut.

    the log, one user per line        cut
    u1   ● ● ● ● ● ● ● ● ● ● ● ● ● ● ●│◉ ○ ○ ○          first: ◉      all: ◉ ○
    u2         ● ●                    │                  no judged event
    u3                                │  ◉ ○             the history of ◉ is empty

Decided: an item can be recommended after its first event in the log, the earliest proof that it exists. An item that
appears later does not compete. If the judged event is itself the first event of its item, every rival misses it:
if the item competed, its age of 0 would give it away.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.data.sequences import Sequences
from tackboard.data.time_split import shown_instant

Judged = Literal["first", "last", "all"]
JUDGED: tuple[Judged, ...] = ("first", "last", "all")


@dataclasses.dataclass(frozen=True)
class JudgedEvents:
    """J events to predict: events[j] is the index of an event, and users[j] the position of its user."""

    users: NDArray[np.int64]
    events: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.users)

    def take(self, part: slice | NDArray[np.int64]) -> JudgedEvents:
        return JudgedEvents(self.users[part], self.events[part])

    def items(self, sequences: Sequences) -> NDArray[np.int64]:
        """Returns the position in the catalogue of the item of each event [J]."""
        return sequences.item_places[self.events]

    def lengths(self, sequences: Sequences) -> NDArray[np.int64]:
        """Returns the number of events before each event [J]."""
        return self.events - sequences.offsets[:-1][self.users]


def held_out_events(sequences: Sequences) -> JudgedEvents:
    """Returns the held-out event of each user with a history. Raises DataError if there are none.

    A user with fewer than `held_out` positive events is left out, because the target of validation could then be the
    same event as the target of the test.
    """
    targets = sequences.targets
    counts = np.append(0, np.cumsum(sequences.is_positive))
    from_target = counts[sequences.offsets[1:]] - counts[targets]
    has_target = (targets >= 0) & (from_target >= sequences.source.held_out)
    users = np.flatnonzero(has_target & (targets > sequences.offsets[:-1]))
    if len(users) == 0:
        raise DataError(
            f"{sequences.source.path} has no user to evaluate",
            allowed="a user needs as many positive events as data.held_out, and an event before the held-out event",
        )
    return JudgedEvents(users, targets[users])


def events_between(sequences: Sequences, begin_ms: int, end_ms: int | None, judged: Judged = "all") -> JudgedEvents:
    """Returns positive events with a time from `begin_ms` to before `end_ms`, in the order of their times.

    `judged` says whether each user's first of these events is returned, the last, or all.
    """
    times = sequences.events.times
    chosen = sequences.is_positive & (times >= begin_ms)
    if end_ms is not None:
        chosen &= times < end_ms
    events = np.flatnonzero(chosen)
    users = np.searchsorted(sequences.offsets, events, side="right") - 1
    if judged != "all" and len(users):
        is_new = np.append(True, users[1:] != users[:-1])
        kept = is_new if judged == "first" else np.append(is_new[1:], True)
        events, users = events[kept], users[kept]
    order = np.argsort(times[events], kind="stable")
    return JudgedEvents(users[order], events[order])


def judged_events(sequences: Sequences, judged: Judged) -> JudgedEvents:
    """Returns the events that the source's split holds out. Raises DataError if there are none."""
    split = sequences.source.time_split
    if split is None:
        return held_out_events(sequences)
    found = events_between(sequences, split.cut_ms, None, judged)
    if len(found) == 0:
        raise DataError(
            f"{sequences.source.path} has no positive event to judge",
            allowed=f"positive events at or after data.cut = {shown_instant(split.cut_ms)} are judged",
            fix="choose an earlier cut, or name more actions in data.positive_actions",
        )
    return found


def first_seen(sequences: Sequences) -> NDArray[np.int64]:
    """Returns the time in ms of each item's first event in the log [V], or the largest int64 without events."""
    times = np.full(len(sequences.catalogue), np.iinfo(np.int64).max)
    np.minimum.at(times, sequences.item_places, sequences.events.times)
    return times
