"""What the step plan must know of a dataset: tokens per bucket, and how often each item is a positive.

One pass over user, action, item and time of the events, a bucket at a time. What is kept grows with the number of
buckets and of items, not with that of events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.progress import Progress
from tackboard.data.plan import cut_segments
from tackboard.data.source import SequenceSource
from tackboard.events.dataset import ITEMS
from tackboard.events.schema import numpy_column
from tackboard.features.column import ranges
from tackboard.features.tables import find_ids

LONG = 4_000_000
"""Events from which on a pass over them says how far it is."""


class ItemFrequencies:
    """Each item's share of the positive training events, for the popularity correction of the loss."""

    def __init__(self, item_ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """`item_ids` rise; each of `counts` is 1 or more."""
        total = max(1, int(counts.sum()))
        self._ids = item_ids
        self._log_share = np.log(counts / total).astype(np.float32)
        # An item met only as input (never as a positive) is as rare as half an event.
        self._log_unseen = np.float32(np.log(0.5 / total))

    @classmethod
    def of(cls, item_ids: NDArray[np.int64]) -> ItemFrequencies:
        """The shares among `item_ids`, an entry per event."""
        return cls(*np.unique(item_ids, return_counts=True))

    def log_share(self, item_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log of the share of each of `item_ids`."""
        if len(self._ids) == 0:
            return np.full(len(item_ids), self._log_unseen)
        position = np.minimum(np.searchsorted(self._ids, item_ids), len(self._ids) - 1)
        return np.where(self._ids[position] == item_ids, self._log_share[position], self._log_unseen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingIndex:
    """`bucket_tokens` [G] are the training events of each bucket."""

    bucket_tokens: NDArray[np.int64]
    num_segments: int
    longest: int
    frequencies: ItemFrequencies


def index_training(
    source: SequenceSource,
    max_length: int,
    *,
    newest_only: bool = False,
    of_part: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None,
    quiet: bool = True,
) -> TrainingIndex:
    """Looks through a dataset once. One without a positive event to train on raises DataError.

    `of_part` says which users count; all, if not given.
    """
    tokens = np.zeros(source.num_buckets, dtype=np.int64)
    # Counted by position in the catalogue, which is as large as it will get.
    counts = np.zeros(len(source.catalogue), dtype=np.int64)
    num_segments, longest = 0, 0
    num_events = source.dataset.num_events
    with Progress("indexing", total=num_events, unit="events", quiet=quiet or num_events < LONG) as progress:
        for bucket in range(source.num_buckets):
            # Times are read for their order alone: a history that is not sorted by them trains on the future.
            table = source.read_columns(source.spans_of([bucket]), ["user_id", "action", "item_id", "time_ms"])
            source.dataset.layout.check_users(bucket, numpy_column(table, "user_id"), source.dataset.path)
            users = source.ranges_of_users(table)
            begins, ends = users.offsets[:-1], users.train_ends
            if of_part is not None:
                ends = np.where(of_part(users.user_ids), ends, begins)
            segments = cut_segments(begins, ends, max_length, newest_only=newest_only)
            num_segments += len(segments.lengths)
            longest = max(longest, int(segments.lengths.max(initial=0)))
            tokens[bucket] = segments.lengths.sum()
            events = ranges(segments.starts, segments.lengths)
            item_ids = numpy_column(table, "item_id")[events[users.is_positive[events]]]
            if not _count(source.catalogue, counts, item_ids):
                raise CorruptFileError(
                    f"{source.dataset.path / ITEMS} lacks items that {source.dataset.events_path} has"
                )
            progress.advance(table.num_rows)
    if not num_segments:
        raise DataError(
            f"{source.path} has no event to train on",
            allowed="each user's last positive event is held out for evaluation",
            fix="use users with at least two events",
        )
    if not counts.any():
        raise DataError(
            f"{source.path} has no positive event to train on",
            allowed="each user's last positive event is held out for evaluation",
            fix="name more actions in data.positive_actions, or use users with at least two positive events",
        )
    frequencies = ItemFrequencies(source.catalogue[counts > 0], counts[counts > 0])
    return TrainingIndex(
        bucket_tokens=tokens, num_segments=num_segments, longest=longest, frequencies=frequencies
    )  # fmt: skip


def _count(catalogue: NDArray[np.int64], counts: NDArray[np.int64], item_ids: NDArray[np.int64]) -> bool:
    """Adds the occurrences in `item_ids` to `counts`; False where the catalogue does not have one of them."""
    found = pc.value_counts(pa.array(item_ids))
    places = find_ids(catalogue, found.field("values").to_numpy())
    if (places < 0).any():
        return False
    counts[places] += found.field("counts").to_numpy()
    return True
