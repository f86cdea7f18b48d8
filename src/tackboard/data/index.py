"""Counts the tokens of each bucket (for the step plan) and the positive events of each item (for the loss).

The counts come from one pass over the users, actions, items and times of the events, one bucket at a time. The size of
the counts grows with the number of buckets and items, not with the number of events. The counts are stored, so that the
next run over the same snapshot with the same settings can read them:

    datasets/<name>/index/<snapshot>/<settings>/   bucket_tokens · item_counts · MANIFEST.json

The first two files hold little-endian int64 numbers. <settings> is a hash of all settings that decide the counts. For
requests (request_loader.py), only tokens are counted, in the same way. Decided: a stored index is optional. A damaged
index, or an index that does not fit the dataset, is made again. If the folder is read-only, the index is not stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, DataError, TackboardError
from tackboard.core.files import new_directory, remove_directory
from tackboard.core.manifest import verify_manifest, write_manifest
from tackboard.core.progress import Progress
from tackboard.data.config import PartOfUsers
from tackboard.data.source import SequenceSource
from tackboard.data.step_plan import cut_segments
from tackboard.events.dataset import ITEMS, index_folder
from tackboard.events.schema import numpy_column
from tackboard.features.column import ranges
from tackboard.features.entity_tables import find_ids

KIND = "training index"
VERSION = 1
"""Version of the stored counts. Raise the version if a change of the code gives other counts for the same settings."""
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


@dataclasses.dataclass(frozen=True)
class IndexCounts:
    """Holds the content of a stored index: arrays of whole numbers, and single whole numbers."""

    arrays: dict[str, NDArray[np.int64]]
    figures: dict[str, int]


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
        "users": dataclasses.asdict(users),
    }
    counts = counted_once(
        source,
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


def counted_once(
    source: SequenceSource,
    settings: Mapping[str, Any],
    count: Callable[[], IndexCounts],
    fits: Callable[[IndexCounts], bool],
) -> IndexCounts:
    """Returns the stored counts of `source` for these settings. If there are none, calls `count` and stores its result.

    `settings` must hold everything that decides the counts. `fits` says whether stored counts fit this dataset.
    """
    place = index_place(source, settings)
    counts = None if place is None else _read(place, fits)
    if counts is None:
        counts = count()
        if place is not None:
            _keep(place, counts)
    return counts


def index_place(source: SequenceSource, settings: Mapping[str, Any]) -> Path | None:
    """Returns the folder of the index for these settings, or None if the snapshot has no folder for indices."""
    folder = index_folder(source.dataset.path)
    files = {entry["name"]: entry["sha256"] for entry in source.dataset.manifest["files"]}
    everything = {"version": VERSION, "files": files, **settings}
    digest = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / digest[:16]


def _read(place: Path, fits: Callable[[IndexCounts], bool]) -> IndexCounts | None:
    """Returns the stored index, or None if it does not exist, is damaged or does not fit."""
    try:
        manifest = verify_manifest(place, KIND)
        names = [entry["name"] for entry in manifest["files"]]
        arrays = {name: np.fromfile(place / name, "<i8").astype(np.int64) for name in names}
        figures = {name: value for name, value in manifest.items() if type(value) is int}
        counts = IndexCounts(arrays, figures)
        is_sane = all(array.min(initial=0) >= 0 for array in arrays.values()) and fits(counts)
    except (OSError, DataError, KeyError, TypeError, ValueError):
        return None
    return counts if is_sane else None


def _fits(counts: IndexCounts, source: SequenceSource, max_length: int) -> bool:
    tokens, items = counts.arrays["bucket_tokens"], counts.arrays["item_counts"]
    num_segments, longest = counts.figures["num_segments"], counts.figures["longest"]
    fits = (len(tokens), len(items)) == (source.num_buckets, len(source.catalogue)) and 1 <= longest <= max_length
    fits = fits and 1 <= items.sum() <= tokens.sum() <= source.dataset.num_events
    return bool(fits and 1 <= num_segments <= tokens.sum())


def _keep(place: Path, counts: IndexCounts) -> None:
    """Stores an index for the next run. Errors are ignored; for example, another run may have stored it already."""
    with contextlib.suppress(OSError, TackboardError):
        if place.exists():
            remove_directory(place)
        with new_directory(place) as folder:
            for name, array in counts.arrays.items():
                array.astype("<i8").tofile(folder / name)
            write_manifest(folder, KIND, counts.figures, meant=counts.arrays)


def _pass_over(
    source: SequenceSource, max_length: int, users: PartOfUsers, *, newest_only: bool, quiet: bool
) -> IndexCounts:
    """Counts tokens and positives in one pass over the events."""
    tokens = np.zeros(source.num_buckets, dtype=np.int64)
    # The index of an item in `counts` is its position in the catalogue, so `counts` has its final size from the start.
    counts = np.zeros(len(source.catalogue), dtype=np.int64)
    num_segments, longest = 0, 0
    num_events = source.dataset.num_events
    with Progress("indexing", total=num_events, unit="events", quiet=quiet or num_events < LONG) as progress:
        for bucket in range(source.num_buckets):
            # Times are read only to check their order, because training on an unsorted history would see the future.
            table = source.read_columns(source.spans_of([bucket]), ["user_id", "action", "item_id", "time_ms"])
            source.dataset.layout.check_users(bucket, numpy_column(table, "user_id"), source.dataset.path)
            found = source.ranges_of_users(table)
            begins = found.offsets[:-1]
            ends = np.where(users.of(found.user_ids), found.train_ends, begins)
            segments = cut_segments(begins, ends, max_length, newest_only=newest_only)
            num_segments += len(segments.lengths)
            longest = max(longest, int(segments.lengths.max(initial=0)))
            tokens[bucket] = segments.lengths.sum()
            events = ranges(segments.starts, segments.lengths)
            item_ids = numpy_column(table, "item_id")[events[found.is_positive[events]]]
            if not _count(source.catalogue, counts, item_ids):
                raise CorruptFileError(
                    f"{source.dataset.path / ITEMS} lacks items that {source.dataset.events_path} has"
                )
            progress.advance(table.num_rows)
    if not num_segments:
        raise DataError(
            f"{source.path} has no event to train on",
            allowed="a user's held-out positive event and all later events are not trained on",
            fix="use users with at least two events",
        )
    if not counts.any():
        raise DataError(
            f"{source.path} has no positive event to train on",
            allowed="a user's held-out positive event and all later events are not trained on",
            fix="name more actions in data.positive_actions, or use users with at least two positive events",
        )
    figures = {"num_segments": num_segments, "longest": longest}
    return IndexCounts({"bucket_tokens": tokens, "item_counts": counts}, figures)


def _count(catalogue: NDArray[np.int64], counts: NDArray[np.int64], item_ids: NDArray[np.int64]) -> bool:
    """Adds the number of occurrences of each item to `counts`. Returns False if the catalogue lacks an item."""
    found = pc.value_counts(pa.array(item_ids))
    places = find_ids(catalogue, found.field("values").to_numpy())
    if (places < 0).any():
        return False
    counts[places] += found.field("counts").to_numpy()
    return True
