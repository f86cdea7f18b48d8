"""Divides judged events into slices, such as the age of the item, and computes the figures of each slice.

A mean over all events hides where a model fails. The slices answer what a reader asks next. Does the model know new
items? Does it need a long history? How fast does it age after the cut? Does it only repeat what users saw before?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.data.sequences import Sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.ranking import Ranked
from tackboard.events.schema import encode
from tackboard.features.column import ranges
from tackboard.metrics.ranks import RankingMetrics

DAY_MS = 24 * HOUR_MS
AGE_BOUNDS = (1, HOUR_MS, DAY_MS, 7 * DAY_MS, 28 * DAY_MS)
AGE_LABELS = ("its first event", "under 1 hour", "1 to 24 hours", "1 to 7 days", "7 to 28 days", "28 days or more")
LENGTH_BOUNDS = (1, 5, 20, 100)
LENGTH_LABELS = ("no event", "1 to 4 events", "5 to 19 events", "20 to 99 events", "100 or more events")
SINCE_BOUNDS = (HOUR_MS, 6 * HOUR_MS, DAY_MS, 3 * DAY_MS, 7 * DAY_MS)
SINCE_LABELS = ("under 1 hour", "1 to 6 hours", "6 to 24 hours", "1 to 3 days", "3 to 7 days", "7 days or more")
MOST_NAMES = 12
"""This number of most frequent actions (or surfaces) have slices of their own. All others are one slice."""


class SeenItems:
    """Knows each user's first event with each item. Memory grows with the events, not with the judged histories."""

    def __init__(self, sequences: Sequences) -> None:
        self._num_items = len(sequences.catalogue)
        users = np.repeat(np.arange(len(sequences.user_ids)), np.diff(sequences.offsets))
        keys = users * self._num_items + sequences.item_places
        self._keys, self._first_events = np.unique(keys, return_index=True)

    def before(self, judged: JudgedEvents, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the user had seen each item of `places` [J, k] before the judged event; -1 means no item."""
        wanted = judged.users[:, None] * self._num_items + places
        found = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        earlier = self._first_events[found] < judged.events[:, None]
        return (self._keys[found] == wanted) & earlier & (places >= 0)


@dataclasses.dataclass(frozen=True)
class Slicing:
    """Divides J judged events: event j belongs to the slice labels[codes[j]]."""

    name: str
    labels: tuple[str, ...]
    codes: NDArray[np.int64]


def slicings_of(
    sequences: Sequences,
    judged: JudgedEvents,
    known: NDArray[np.bool_],
    appears_ms: NDArray[np.int64],
    seen: SeenItems,
) -> list[Slicing]:
    """Returns all slicings. `known` [V] says which items training saw, and `appears_ms` [V] when each item appeared."""
    times, items = sequences.events.times[judged.events], judged.items(sequences)
    was_seen = seen.before(judged, items[:, None])[:, 0]
    split = sequences.source.time_split
    found = [
        Slicing("item age", AGE_LABELS, np.digitize(times - appears_ms[items], AGE_BOUNDS)),
        Slicing("item in training", ("never seen", "seen"), known[items].astype(np.int64)),
        Slicing("item for the user", ("new", "seen before"), was_seen.astype(np.int64)),
        Slicing("history", LENGTH_LABELS, np.digitize(judged.lengths(sequences), LENGTH_BOUNDS)),
    ]
    if split is not None:
        found.append(Slicing("time since the cut", SINCE_LABELS, np.digitize(times - split.cut_ms, SINCE_BOUNDS)))
    return found + [_named(sequences, judged, kind) for kind in ("action", "surface")]


def history_items(sequences: Sequences, judged: JudgedEvents) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns an entry for each event of each history: (row of the judged event, position of the item)."""
    lengths = judged.lengths(sequences)
    events = ranges(sequences.offsets[:-1][judged.users], lengths)
    return np.repeat(np.arange(len(judged)), lengths), sequences.item_places[events]


def sliced_rows(slicings: list[Slicing], ranked: Mapping[str, Ranked], cutoff: int) -> list[dict[str, Any]]:
    """Returns a row for each slice and rival, with the number of events, HR and NDCG at the cutoff."""
    rows = []
    for slicing in slicings:
        for code, label in enumerate(slicing.labels):
            chosen = slicing.codes == code
            if not chosen.any():
                continue
            for name, found in ranked.items():
                metrics = RankingMetrics((cutoff,))
                metrics.update(found.ranks[chosen])
                figures = {key: round(value, 6) for key, value in metrics.result().items()}
                rows.append(
                    {"by": slicing.name, "slice": label, "num_events": int(chosen.sum()), "name": name} | figures
                )
    return rows


def _named(sequences: Sequences, judged: JudgedEvents, kind: str) -> Slicing:
    """Slices by the action or the surface of the judged event."""
    column = encode(sequences.source.dataset.read_events([kind])[kind])
    names, codes = column.dictionary.to_pylist(), column.indices.to_numpy()[judged.events]
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:MOST_NAMES]
    place = np.full(len(names), len(order))
    place[order] = np.arange(len(order))
    return Slicing(kind, (*(names[code] for code in order), "others"), place[codes])
