"""Defines the baselines that every model must beat. They count events; nothing is learned.

    popularity            number of positive training events of an item
    recent popularity     the same in a window, such as the last hour. Live: the window ends at each judged event.
                          Frozen: the window ends at the end of training
    item-to-item          co-occurrence with the user's most recent items
    recently seen         the user's own items, the newest first

Popularity, item-to-item and frozen recent popularity are fitted on what the model was trained on (`TrainingEvents`).
Only live counts and the user's own history include later events, as they would in a server.

`ItemToItem` scores items by cosine co-occurrence. Two items co-occur if they are within `WINDOW` events of each other
in one history. Each item keeps its `NUM_NEIGHBOURS` strongest neighbours. The score of an item for a user is the sum of
its co-occurrences with the user's last `NUM_RECENT` items. Each step back in the history multiplies the weight by
`DECAY`. Counting is done by sorting, so memory grows with the events and never with items × items.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.data.config import PartOfUsers
from tackboard.data.sequences import Sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation.judged_events import JudgedEvents, events_between
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.ranking import ScoreEvents, target_ranks
from tackboard.features.entity_tables import find_ids

WINDOW = 5
NUM_NEIGHBOURS = 100
NUM_RECENT = 10
DECAY = 0.8
NUM_SEEN = 200
"""Number of newest events that `RecentlySeen` reads."""
WINDOWS_H = (1.0, 3.0, 6.0, 12.0, 24.0, 72.0, 168.0, 336.0, 720.0)
"""Windows of recent popularity, in hours. One is chosen on validation for live counts, and one for frozen counts."""
VALIDATION_SHARE = 0.1
"""Without a validation slice, the window is chosen on this share of the training events, the newest ones."""
NUM_VALIDATION_EVENTS = 1000
"""The window is chosen on at most this number of events, which are drawn by a fixed key."""
DRAW_STREAM = 44
"""Random stream of this draw."""
CHOSEN_AT = 10
"""The window with the best HR at this cutoff is chosen."""


@dataclasses.dataclass(frozen=True)
class TrainingEvents:
    """The E events that a model was trained on, sorted by user. Items are positions in the catalogue that is ranked."""

    items: NDArray[np.int64]
    users: NDArray[np.int64]
    times: NDArray[np.int64]
    """When each event was known: its time, or the time at which it was received if that is later."""
    is_positive: NDArray[np.bool_]
    num_items: int

    @classmethod
    def of(
        cls, trained: Sequences, part: PartOfUsers | None = None, catalogue: NDArray[np.int64] | None = None
    ) -> TrainingEvents:
        """`trained` holds the histories of the log, and `part` says which users training read. Events on items that are
        not in the ranked `catalogue` (default: that of `trained`) are left out."""
        events = trained.training_events()
        users = np.repeat(np.arange(len(trained.user_ids)), np.diff(trained.offsets))[events]
        kept = (part or PartOfUsers()).of(trained.user_ids)[users]
        places = find_ids(trained.catalogue if catalogue is None else catalogue, trained.item_ids[events])
        kept &= places >= 0
        events, users = events[kept], users[kept]
        return cls(
            items=places[kept],
            users=users,
            times=trained.known_at[events],
            is_positive=trained.is_positive[events],
            num_items=len(trained.catalogue if catalogue is None else catalogue),
        )

    @property
    def end_ms(self) -> int:
        """1 ms after the last of these events was known."""
        return int(self.times.max(initial=0)) + 1

    def counts(self) -> NDArray[np.int64]:
        """Returns the number of positive events of each item [V]."""
        return np.bincount(self.items[self.is_positive], minlength=self.num_items)

    def live_counts(self) -> LiveCounts:
        """Returns the positive events, sorted by the time at which they were known."""
        return LiveCounts.sort(self.items[self.is_positive], self.times[self.is_positive], self.num_items)


class Popularity:
    """Scores an item by its number of positive training events."""

    def __init__(self, training: TrainingEvents) -> None:
        self.counts = training.counts().astype(np.float32)

    def score(self, judged: JudgedEvents) -> NDArray[np.float32]:
        """Returns scores [J, catalogue], which are the same for all events."""
        return np.broadcast_to(self.counts, (len(judged), len(self.counts))).copy()


class RecentPopularity:
    """Scores an item by its number of positive events in the window before an instant.

    This instant is the time of each judged event or, if `frozen_ms` is given, `frozen_ms` for all judged events. Items
    with equal numbers are ordered by their number of positive training events.
    """

    def __init__(
        self,
        sequences: Sequences,
        counts: LiveCounts,
        trained: NDArray[np.int64],
        window_h: float,
        *,
        frozen_ms: int | None = None,
    ) -> None:
        """`trained` holds the number of positive training events of each item [V]."""
        self._times = sequences.events.times
        self._window = counts.window(round(window_h * HOUR_MS))
        self._ties = (trained / (1 + trained.max(initial=0))).astype(np.float32)
        self._frozen_ms = frozen_ms

    def score(self, judged: JudgedEvents) -> NDArray[np.float32]:
        """Returns scores [J, catalogue]."""
        times = self._times[judged.events]
        if self._frozen_ms is not None:
            times = np.full_like(times, self._frozen_ms)
        scores = np.empty((len(judged), len(self._ties)), dtype=np.float32)
        for time in np.unique(times):
            scores[times == time] = self._window.at(int(time)) + self._ties
        return scores


class ItemToItem:
    """Scores an item by its cosine co-occurrence with the user's most recent items."""

    def __init__(self, sequences: Sequences, training: TrainingEvents) -> None:
        self.sequences = sequences
        items, users, num_items = training.items, training.users, training.num_items
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

    def score(self, judged: JudgedEvents) -> NDArray[np.float32]:
        """Returns scores [J, catalogue], from the histories before the judged events."""
        scores = np.zeros((len(judged), len(self.sequences.catalogue)), dtype=np.float32)
        for row, recent in enumerate(_newest_items(self.sequences, judged, NUM_RECENT)):
            for age, item in enumerate(recent[::-1]):
                neighbours = slice(self._starts[item], self._starts[item + 1])
                scores[row, self._neighbours[neighbours]] += DECAY**age * self._strengths[neighbours]
        return scores


class RecentlySeen:
    """Scores items by how recently the user saw them. The newest item scores highest, and unseen items score 0."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences

    def score(self, judged: JudgedEvents) -> NDArray[np.float32]:
        """Returns scores [J, catalogue], from the histories before the judged events."""
        scores = np.zeros((len(judged), len(self.sequences.catalogue)), dtype=np.float32)
        for row, recent in enumerate(_newest_items(self.sequences, judged, NUM_SEEN)):
            # Scores are assigned from old to new, so the newest event counts for an item that was seen several times.
            scores[row, recent] = 1.0 / np.arange(len(recent), 0, -1, dtype=np.float32)
        return scores


@dataclasses.dataclass(frozen=True)
class Baselines:
    """The baselines of one evaluation, and the windows of recent popularity, in hours."""

    rivals: dict[str, ScoreEvents]
    window_h: dict[str, float]


def simple_baselines(sequences: Sequences, training: TrainingEvents) -> dict[str, ScoreEvents]:
    """Returns popularity and item-to-item."""
    return {"popularity": Popularity(training).score, "item-to-item": ItemToItem(sequences, training).score}


def all_baselines(
    sequences: Sequences,
    training: TrainingEvents,
    live: LiveCounts,
    *,
    filter_seen: bool,
    appears_ms: NDArray[np.int64] | None = None,
) -> Baselines:
    """Returns all baselines. `live` holds the counts of `sequences`. The windows are chosen on `validation_events`."""
    rivals = simple_baselines(sequences, training) | {"recently seen": RecentlySeen(sequences).score}
    split = sequences.source.time_split
    chosen, begin_ms = validation_events(sequences, training)
    trained = training.counts()
    windows: dict[str, float] = {}
    # Leave-last-out judges events of all times, so it has no frozen counts.
    for name, counts, validation_ms, frozen_ms in (
        ("recent, live", live, None, None),
        *([("recent, frozen", training.live_counts(), begin_ms, training.end_ms)] if split is not None else []),
    ):
        rates = {}
        for hours in WINDOWS_H if len(chosen) else WINDOWS_H[4:5]:
            rival = RecentPopularity(sequences, counts, trained, hours, frozen_ms=validation_ms)
            ranks = target_ranks(rival.score, sequences, chosen, filter_seen=filter_seen, appears_ms=appears_ms)
            rates[hours] = float((ranks < CHOSEN_AT).mean()) if len(ranks) else 0.0
        windows[name] = max(rates, key=lambda hours: rates[hours])
        rivals[name] = RecentPopularity(sequences, counts, trained, windows[name], frozen_ms=frozen_ms).score
    return Baselines(rivals, windows)


def validation_events(sequences: Sequences, training: TrainingEvents) -> tuple[JudgedEvents, int]:
    """Returns events to choose windows and fit the live head on, sorted by time, and the instant at which they begin.

    The events come from the validation slice or, if there is none, from the time of the newest training events.
    """
    split = sequences.source.time_split
    end_ms = training.end_ms if split is None else split.until_ms
    begin_ms = int(np.quantile(training.times, 1.0 - VALIDATION_SHARE)) if len(training.times) else end_ms
    if split is not None and split.has_slice:
        begin_ms, end_ms = split.until_ms, split.cut_ms
    chosen = events_between(sequences, begin_ms, end_ms)
    # Without a cut, each user's events end before the held-out event. With a cut, they end before the user's first
    # event that happened or was received at or after the cut.
    ends = sequences.train_ends if sequences.cuts is None else sequences.cuts.cut_ends
    chosen = chosen.take(np.flatnonzero(chosen.events < ends[chosen.users]))
    return _drawn(chosen, sequences), begin_ms


def _drawn(judged: JudgedEvents, sequences: Sequences) -> JudgedEvents:
    """Returns at most `NUM_VALIDATION_EVENTS` of the events, in their order."""
    if len(judged) <= NUM_VALIDATION_EVENTS:
        return judged
    draw = keyed_random.bits(0, DRAW_STREAM, sequences.user_ids[judged.users], sequences.events.times[judged.events])
    return judged.take(np.sort(np.argsort(draw, kind="stable")[:NUM_VALIDATION_EVENTS]))


def _newest_items(sequences: Sequences, judged: JudgedEvents, count: int) -> list[NDArray[np.int64]]:
    """Returns for each judged event the positions of the newest items of its history, oldest first."""
    begins = sequences.offsets[:-1][judged.users]
    starts = np.maximum(begins, judged.events - count)
    return [
        sequences.item_places[start:end] for start, end in zip(starts.tolist(), judged.events.tolist(), strict=True)
    ]


def _transposed(keys: NDArray[np.int64], num_items: int) -> NDArray[np.int64]:
    return (keys % num_items) * num_items + keys // num_items
