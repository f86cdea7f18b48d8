"""Counts the tokens of each bucket (for the step plan) and the positive events of each item (for the loss).

The counts come from one pass over the users, actions, items and times of the events, one bucket at a time. The size of
the counts grows with the number of buckets and items, not with the number of events. The counts are stored, so that the
next run over the same snapshot with the same settings can read them (stored_counts.py):

    datasets/<name>/index/<snapshot>/<settings>/   bucket_tokens · item_counts · MANIFEST.json

For requests (request_loader.py), only tokens are counted, in the same way.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.progress import Progress
from tackboard.data.config import PartOfUsers
from tackboard.data.sequences import UserRanges
from tackboard.data.source import SequenceSource
from tackboard.data.step_plan import Segments, cut_segments
from tackboard.data.stored_counts import StoredCounts, counted_once
from tackboard.data.time_split import shown_instant
from tackboard.events.dataset import ITEMS
from tackboard.events.schema import numpy_column
from tackboard.features.column import ranges
from tackboard.features.entity_tables import find_ids

LONG = 4_000_000
"""A pass over at least this many events shows its progress."""


class ItemFrequencies:
    """Each item's share of the positive training events, for the popularity correction of the loss."""

    def __init__(self, item_ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """`item_ids` is in ascending order; each of `counts` is 1 or more."""
        total = max(1, int(counts.sum()))
        self._ids = item_ids
        self._log_share = np.log(counts / total).astype(np.float32)
        # An item without positive events counts as if it had half a positive event.
        self._log_unseen = np.float32(np.log(0.5 / total))

    @classmethod
    def of(cls, item_ids: NDArray[np.int64]) -> ItemFrequencies:
        """Computes the shares from `item_ids`, which has one entry per event."""
        return cls(*np.unique(item_ids, return_counts=True))

    def log_share(self, item_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the log of the share of each item in `item_ids`."""
        if len(self._ids) == 0:
            return np.full(len(item_ids), self._log_unseen)
        position = np.minimum(np.searchsorted(self._ids, item_ids), len(self._ids) - 1)
        return np.where(self._ids[position] == item_ids, self._log_share[position], self._log_unseen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingIndex:
    """The counts of a dataset. `bucket_tokens` [G] holds the number of training events of each bucket."""

    bucket_tokens: NDArray[np.int64]
    num_segments: int
    longest: int
    frequencies: ItemFrequencies


def segments_of(
    found: UserRanges, users: PartOfUsers, max_length: int, *, newest_only: bool = False
) -> tuple[Segments, NDArray[np.bool_]]:
    """Returns the segments of one part of the users, and which events are predicted [N].

    Without cuts in time, the segments hold all training events, and all positive events are predicted. With cuts, each
    user has a first event to predict (`UserCuts.first_predicted`, or the start of the slice). The segments then hold
    the events from this event on, and the earlier events that fill the oldest segment. Positive events from this event
    on are predicted.
    """
    begins, ends = found.offsets[:-1], found.train_ends
    if found.cuts is None:
        ends = np.where(users.of(found.user_ids), ends, begins)
        return cut_segments(begins, ends, max_length, newest_only=newest_only), found.is_positive
    first = found.cuts.first_predicted
    if users.is_slice:
        first, ends = ends, found.cuts.cut_ends
    else:
        ends = np.where(users.of(found.user_ids), ends, first)
    whole = np.where(first > begins, -(-(ends - first) // max_length) * max_length, ends - begins)
    segments = cut_segments(np.maximum(begins, ends - whole), ends, max_length, newest_only=newest_only)
    places = np.arange(len(found.is_positive)) - np.repeat(first, np.diff(found.offsets))
    return segments, found.is_positive & (places >= 0)


def index_training(
    source: SequenceSource,
    max_length: int,
    *,
    newest_only: bool = False,
    users: PartOfUsers | None = None,
    quiet: bool = True,
) -> TrainingIndex:
    """Reads the stored counts of a dataset, or makes them. Raises DataError if no positive event can be trained on.

    `users` says whose events count; None means all users.
    """
    users = users or PartOfUsers()
    settings = {
        "max_length": max_length,
        "newest_only": newest_only,
        "held_out": source.held_out,
        "positive_actions": sorted(source.positive_actions),
        "users": {name: value for name, value in dataclasses.asdict(users).items() if value is not False},
        **source.instants(),
    }
    counts = counted_once(
        source.dataset,
        settings,
        lambda: _pass_over(source, max_length, users, newest_only=newest_only, quiet=quiet),
        lambda found: _fits(found, source, max_length),
    )
    item_counts = counts.arrays["item_counts"]
    is_seen = item_counts > 0
    return TrainingIndex(
        bucket_tokens=counts.arrays["bucket_tokens"],
        num_segments=counts.figures["num_segments"],
        longest=counts.figures["longest"],
        frequencies=ItemFrequencies(source.catalogue[is_seen], item_counts[is_seen]),
    )


def _fits(counts: StoredCounts, source: SequenceSource, max_length: int) -> bool:
    tokens, items = counts.arrays["bucket_tokens"], counts.arrays["item_counts"]
    num_segments, longest = counts.figures["num_segments"], counts.figures["longest"]
    fits = (len(tokens), len(items)) == (source.num_buckets, len(source.catalogue)) and 1 <= longest <= max_length
    fits = fits and 1 <= items.sum() <= tokens.sum() <= source.dataset.num_events
    return bool(fits and 1 <= num_segments <= tokens.sum())


def _pass_over(
    source: SequenceSource, max_length: int, users: PartOfUsers, *, newest_only: bool, quiet: bool
) -> StoredCounts:
    """Counts tokens and positives in one pass over the events."""
    tokens = np.zeros(source.num_buckets, dtype=np.int64)
    # The index of an item in `counts` is its position in the catalogue, so `counts` has its final size from the start.
    counts = np.zeros(len(source.catalogue), dtype=np.int64)
    num_segments, longest = 0, 0
    num_events = source.dataset.num_events
    with Progress("indexing", total=num_events, unit="events", quiet=quiet or num_events < LONG) as progress:
        for bucket in range(source.num_buckets):
            # Times are read only to check their order, because training on an unsorted history would see the future.
            columns = dict.fromkeys([*source.columns_of_ranges, "item_id", "time_ms"])
            table = source.read_columns(source.spans_of([bucket]), list(columns))
            source.dataset.layout.check_users(bucket, numpy_column(table, "user_id"), source.dataset.path)
            found = source.ranges_of_users(table)
            segments, is_predicted = segments_of(found, users, max_length, newest_only=newest_only)
            num_segments += len(segments.lengths)
            longest = max(longest, int(segments.lengths.max(initial=0)))
            tokens[bucket] = segments.lengths.sum()
            events = ranges(segments.starts, segments.lengths)
            item_ids = numpy_column(table, "item_id")[events[is_predicted[events]]]
            if not _count(source.catalogue, counts, item_ids):
                raise CorruptFileError(
                    f"{source.dataset.path / ITEMS} lacks items that {source.dataset.events_path} has"
                )
            progress.advance(table.num_rows)
    if not num_segments or not counts.any():
        raise _nothing_to_train_on(source, users, has_events=bool(num_segments))
    figures = {"num_segments": num_segments, "longest": longest}
    return StoredCounts({"bucket_tokens": tokens, "item_counts": counts}, figures)


def _nothing_to_train_on(source: SequenceSource, users: PartOfUsers, *, has_events: bool) -> DataError:
    """Returns the error that says why a part of the users has no event, or no positive event, to train on."""
    what = "positive event" if has_events else "event"
    if source.instants():
        purpose = "validation" if users.is_slice or users.part == "validation" else "training"
        instants = {name.removesuffix("_ms"): at for name, at in source.instants().items()}
        instants |= {} if source.time_split else {"end of the log": source.end_ms}
        named = ", ".join(f"{name} {shown_instant(at)}" for name, at in instants.items())
        return DataError(
            f"{source.path} has no {what} for {purpose}",
            allowed=f"these instants decide what is read: {named}",
            fix="choose another data.cut, data.validation_hours or data.predict_from",
        )
    fix = "use users with at least two events"
    if has_events:
        fix = "name more actions in data.positive_actions, or use users with at least two positive events"
    allowed = "a user's held-out positive event and all later events are not trained on"
    return DataError(f"{source.path} has no {what} to train on", allowed=allowed, fix=fix)


def _count(catalogue: NDArray[np.int64], counts: NDArray[np.int64], item_ids: NDArray[np.int64]) -> bool:
    """Adds the number of occurrences of each item to `counts`. Returns False if the catalogue lacks an item."""
    found = pc.value_counts(pa.array(item_ids))
    places = find_ids(catalogue, found.field("values").to_numpy())
    if (places < 0).any():
        return False
    counts[places] += found.field("counts").to_numpy()
    return True
