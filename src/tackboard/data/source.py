"""Reads some or all buckets of a dataset into memory as sequences, for training and evaluation.

This module takes a snapshot, the features that a model reads, and the positive actions. For any choice of buckets it
returns the histories of their users; columns that are not needed for this stay on disk. The data of a user lies in the
same bucket of every file, so events and stored features are joined by reading the same rows of each file.

Leave-last-out: the target of a user is the `held_out`-th positive event, counted from the last. If the user has fewer
positive events, the target is the first of them. If `held_out` is 0, there is no target. Training sees only the events
before the target, and evaluation ranks the catalogue for the target. Decided: neither training nor evaluation uses
events after the target (for example a trailing `hide`).

Split by time: training sees only what happened before an instant (time_split.py). The names of actions and surfaces,
and the items that can be drawn as negatives, then also come from the events before this instant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import check, did_you_mean
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.vocabulary import SINCE_LAST, Vocabulary
from tackboard.data.sequences import Sequences, UserRanges
from tackboard.data.stored_counts import StoredCounts, counted_once
from tackboard.data.time_split import TimeSplit
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.layout import RowReader
from tackboard.events.schema import encode, numpy_column, starts_of_users
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.entity_tables import EntityTable, EventTable, find_ids, load_entities, stored_event_columns
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.plan import Plan
from tackboard.features.standard import HISTORY, NEVER, check_finite, request_features, standard_features
from tackboard.features.stored_features import read_features_rows
from tackboard.features.types import FLOAT

Spans = list[tuple[int, int]]
"""Ranges of rows [first, last)."""
Codes = Callable[[Spans], NDArray[np.int32]]
"""A function that takes ranges of rows of events.parquet and returns a number for each event in them."""


class ReadCounters:
    """Counts the rows, and the compressed bytes of decoded columns, that one source has read in this process."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, *, num_rows: int = 0, num_bytes: int = 0) -> None:
        """Adds the rows and bytes that a thread has read."""
        with self._lock:
            self.num_rows += num_rows
            self.num_bytes += num_bytes

    def __reduce__(self) -> tuple[type[ReadCounters], tuple[()]]:
        return ReadCounters, ()


@dataclasses.dataclass(frozen=True)
class KnownNames:
    """How many events training may read: for each item of the catalogue [V], and for each action and each surface of
    the dataset."""

    items: NDArray[np.int64]
    actions: NDArray[np.int64]
    surfaces: NDArray[np.int64]

    def vocabulary(self, own: Vocabulary) -> Vocabulary:
        """Returns the names of `own`, the vocabulary of the dataset, that training may see."""
        return Vocabulary(
            actions=tuple(name for name, count in zip(own.actions, self.actions, strict=True) if count),
            surfaces=tuple(name for name, count in zip(own.surfaces, self.surfaces, strict=True) if count),
        )


class SequenceSource:
    """Reads sequences from an open snapshot for the features of a model. The source keeps no events in memory."""

    def __init__(
        self,
        dataset: Dataset,
        path: Path,
        *,
        positive_actions: tuple[str, ...] = (),
        held_out: int = 1,
        vocabulary: Vocabulary | None = None,
        features: Callable[[Vocabulary], FeatureSet] = standard_features,
        of_requests: bool = False,
        time_split: TimeSplit | None = None,
        predict_from_ms: int | None = None,
    ) -> None:
        """`path` is the folder as the user named it; `open_sequences` explains the other arguments.

        If `of_requests` is True, times are always read, and the caller computes the features of requests. If
        `time_split` is given, training ends at its instants and `held_out` has no effect. If `predict_from_ms` is
        given, training predicts only events from this instant on; earlier events are context.
        """
        check(held_out >= 0, "held_out", held_out, "0 (nothing), 1 (the last positive event), 2 (the one before it), …")
        if dataset.num_events == 0:
            raise DataError(f"{path} holds no events")
        self.dataset = dataset
        self.path = path
        self.held_out = held_out
        self.time_split = time_split
        self.predict_from_ms = predict_from_ms
        self.counters = ReadCounters()
        self._footer: pq.FileMetaData | None = None
        own = Vocabulary(actions=tuple(dataset.actions), surfaces=tuple(dataset.surfaces))
        self.positive_actions = _known_actions(own, positive_actions)
        self.vocabulary = vocabulary or (own if time_split is None else self.known.vocabulary(own))
        self.features = features(self.vocabulary)
        if self.features.plan.trimmed([HISTORY]).needs_request_time:
            raise ConfigError(
                "the feature history depends on the time of the request",
                allowed="allowed: events.newest(n); training reads ranges of events, which have no request time",
            )
        if not self.features.plan.reads_events:
            raise ConfigError("the feature history is not made of events", allowed="allowed: events.newest(n)")
        self._timed = of_requests or len(self.features.plan.features) > 1
        self._columns = stored_event_columns(dataset, self.features.plan, timed=self._timed)
        self._stored, self._computed = ([], []) if of_requests else self._origins_of_request_features()
        self._context_plan = self.features.plan.trimmed(self._computed) if self._computed else None
        self._entities: tuple[EntityTable | None, EntityTable | None] | None = None

    @property
    def snapshot(self) -> str:
        return self.dataset.path.name

    @property
    def num_buckets(self) -> int:
        """Number of buckets of the dataset. No user is split between buckets."""
        return self.dataset.layout.num_buckets

    @functools.cached_property
    def catalogue(self) -> NDArray[np.int64]:
        """Ids of all items, sorted."""
        return np.unique(self.dataset.read_items(["item_id"])["item_id"].to_numpy())

    @functools.cached_property
    def known(self) -> KnownNames:
        """The items, actions and surfaces of the events that training may read. They are counted once per snapshot."""
        num_names = len(self.dataset.actions), len(self.dataset.surfaces)
        settings = {"kind": "known names", "end_ms": self.end_ms}
        counts = counted_once(
            self.dataset,
            settings,
            lambda: _count_known(self),
            lambda found: (
                len(found.arrays["items"]) == len(self.catalogue)
                and (len(found.arrays["actions"]), len(found.arrays["surfaces"])) == num_names
            ),
        )
        return KnownNames(**counts.arrays)

    @property
    def known_items(self) -> NDArray[np.int64]:
        """Ids of the items that training may see, sorted. Without a split by time, these are all items."""
        return self.catalogue if self.time_split is None else self.catalogue[self.known.items > 0]

    def instants(self) -> dict[str, int]:
        """Returns the instants that decide what training reads, by name; empty for leave-last-out."""
        split = {} if self.time_split is None else dataclasses.asdict(self.time_split)
        return split | ({} if self.predict_from_ms is None else {"predict_from_ms": self.predict_from_ms})

    @property
    def end_ms(self) -> int:
        """The instant before which all training events happened. A run that goes on with this data begins there."""
        return int(self.dataset.statistics["last_ms"]) + 1 if self.time_split is None else self.time_split.until_ms

    def lineage(self) -> dict[str, Any]:
        """Returns what a checkpoint records about the origin of its data."""
        lineage = {"dataset": str(self.path), "snapshot": self.snapshot, "num_events": self.dataset.num_events}
        # A stream has no last event.
        end = {"end_ms": self.end_ms} if "last_ms" in self.dataset.statistics else {}
        return lineage | end | self.instants()

    def read_columns(self, spans: Spans, columns: Sequence[str]) -> pa.Table:
        """Reads some columns of some rows of the events, and counts what was read."""
        with contextlib.closing(RowReader(self.dataset.events_path, self._footer)) as reader:
            self._footer = reader.metadata
            table = reader.read(spans, columns)
            self.counters.add(num_rows=table.num_rows, num_bytes=reader.bytes_read)
        return table

    def spans_of(self, buckets: Sequence[int] | NDArray[np.int64]) -> Spans:
        """Returns the rows of some buckets in events.parquet; adjacent ranges are merged."""
        spans: Spans = []
        for bucket in buckets:
            first, last = self.dataset.layout.rows_of("events", int(bucket))
            if spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        return spans

    @property
    def columns_of_ranges(self) -> tuple[str, ...]:
        """The columns that `ranges_of_users` needs."""
        return ("user_id", "action", *(("time_ms", "received_ms") if self.instants() else ()))

    def ranges_of_users(self, table: pa.Table) -> UserRanges:
        """Finds users, positive events and held-out events of `table`, which needs the `columns_of_ranges`."""
        users = table["user_id"].to_numpy()
        starts = starts_of_users(users)
        actions = encode(table["action"])
        positive = np.isin(np.array(actions.dictionary.to_pylist(), dtype=object), list(self.positive_actions))
        found = UserRanges.cut(
            user_ids=users[starts],
            offsets=np.append(starts, len(users)).astype(np.int64),
            is_positive=positive.take(actions.indices.to_numpy()),  # `take` is twice as fast as indexing.
            held_out=self.held_out,
        )
        if not self.instants():
            return found
        times, received = (numpy_column(table, name) for name in ("time_ms", "received_ms"))
        return found.cut_in_time(times, received, self.time_split, self.predict_from_ms)

    def read(self, buckets: Sequence[int] | NDArray[np.int64] | None = None, codes: Codes | None = None) -> Sequences:
        """Reads the sequences of the users of `buckets`, which are in ascending order; None means all users.

        If `buckets` is None, times are always read, for evaluation and to check their order. For given buckets,
        `index_training` has checked the order. If `codes` is given, item ids are not read; the numbers that `codes`
        returns for the events replace them. Give `codes` only if the features compute nothing from the items
        (`only_carries_items`).
        """
        spans = self.spans_of(range(self.num_buckets) if buckets is None else buckets)
        more = [*(["context"] if self._reads_context() else [])]
        more += ["time_ms", "received_ms"] if buckets is None else []
        names = list(dict.fromkeys([*self._columns, *self.columns_of_ranges, *more]))
        table = self.read_columns(spans, [name for name in names if codes is None or name != "item_id"])
        if codes is not None:
            table = table.append_column("item_id", pa.array(codes(spans)))
        # The chunks of each column are joined here once, because otherwise every use of the column would join them.
        table = table.unify_dictionaries().combine_chunks()
        users = self.ranges_of_users(table)
        events = EventTable.from_arrow(table, self.features.plan)
        return Sequences(
            source=self,
            user_ids=users.user_ids,
            offsets=users.offsets,
            item_ids=events.columns["item"].values,
            is_positive=users.is_positive,
            targets=users.targets,
            cuts=users.cuts,
            events=events,
            request=self._request_features(table, events, spans),
        )

    @functools.cached_property
    def trimming(self) -> dict[str, Any]:
        """Names of the event columns that are read, names of the skipped columns, and the bytes of both in memory."""
        names = ["item", "action", "surface", "time", "received", *self.dataset.fields]
        sources = {
            str(node.params["column"])
            for _, node in self.features.plan.sources()
            if node.params["entity"] == "event"
        }  # fmt: skip
        read = [name for name in names if name in sources or (self._timed and name in ("time", "received"))]
        sizes = {name: 1 if self.dataset.fields.get(name) == "bool" else 8 for name in names}
        return {
            "read": read,
            "skipped": [name for name in names if name not in read],
            "bytes": sum(sizes[name] for name in read) * self.dataset.num_events,
            "bytes_saved": sum(sizes[name] for name in names if name not in read) * self.dataset.num_events,
        }

    def _origins_of_request_features(self) -> tuple[list[str], list[str]]:
        """Returns the names of request features that a backfill stored, and the names of features to compute now."""
        hashes = self.features.feature_hashes()
        stored = read_features(self.dataset.path)
        kept = stored.feature_hashes() if stored is not None else {}
        beside = (HISTORY, SINCE_LAST) if self._measures_histories else (HISTORY,)
        names = [name for name in hashes if name not in beside]
        found = [name for name in names if kept.get(name) == hashes[name]]
        return found, [name for name in names if name not in found]

    def _reads_context(self) -> bool:
        if self._context_plan is None:
            return False
        sources = context_sources(self._context_plan)
        if sources and not self.dataset.has_context:
            raise self._context_plan.missing_source(sources[0][0])
        return bool(sources)

    def _request_features(self, table: pa.Table, events: EventTable, spans: Spans) -> dict[str, Column]:
        """Returns every request feature at the time of each event, from data received strictly before that time."""
        columns: dict[str, Column] = {}
        if self._stored:
            columns, num_bytes = read_features_rows(self.dataset, self._stored, spans)
            self.counters.add(num_bytes=num_bytes)
        if self._context_plan is not None:
            columns |= self._computed_features(self._context_plan, table, events)
            check_finite(self.features, columns)
        if self._measures_histories:
            columns[SINCE_LAST] = _since_event_before(events)
        return columns

    @functools.cached_property
    def _measures_histories(self) -> bool:
        """Whether the feature set has the standard `since_last`, which is computed from the history in the batch.

        A history in training holds every event before the predicted event, including events with the same time and
        events that were received late. The history that a client sends to a server also holds these events.
        """
        return self.features.feature_hashes().get(SINCE_LAST) == request_features().feature_hashes()[SINCE_LAST]

    def _computed_features(self, plan: Plan, table: pa.Table, events: EventTable) -> dict[str, Column]:
        if self._entities is None:
            self._entities = load_entities(self.dataset, plan)
        rows = RequestRows(
            user_ids=np.repeat(events.user_ids, np.diff(events.offsets)),
            request_ms=events.times,
            context=context_columns(plan, table["context"]) if "context" in table.column_names else {},
        )
        users, items = self._entities
        return BatchExecutor(plan, events=events, users=users, items=items).compute(rows)


def open_sequences(
    dataset: str | Path | Dataset,
    positive_actions: tuple[str, ...] = (),
    *,
    held_out: int = 1,
    vocabulary: Vocabulary | None = None,
    features: Callable[[Vocabulary], FeatureSet] = standard_features,
    time_split: Callable[[Dataset], TimeSplit] | None = None,
    predict_from_ms: int | None = None,
) -> SequenceSource:
    """Opens and verifies a dataset, unless it is already open. Empty `positive_actions` means all actions.

    `held_out` says which positive event of a user is held out, counted from the last: 1 for the test, 2 for validation;
    0 holds out nothing. `vocabulary` is the vocabulary of an existing model; its indices may differ from the indices of
    the dataset's own vocabulary. `features` takes a vocabulary and returns the features that the model reads.
    `time_split` takes the opened dataset and returns the instants of a split by time; None means leave-last-out.
    Training predicts only events from the instant `predict_from_ms` on; None means all training events.
    """
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    return SequenceSource(
        opened,
        opened.path if isinstance(dataset, Dataset) else Path(dataset),
        positive_actions=positive_actions,
        held_out=held_out,
        vocabulary=vocabulary,
        features=features,
        time_split=None if time_split is None else time_split(opened),
        predict_from_ms=predict_from_ms,
    )


def load_sequences(dataset: str | Path | Dataset, *arguments: Any, **settings: Any) -> Sequences:
    """Reads all sequences of a dataset into memory; the arguments are those of `open_sequences`."""
    return open_sequences(dataset, *arguments, **settings).read()


def snapshot_path(lineage: Mapping[str, Any]) -> Path:
    """Returns the folder of the snapshot that `SequenceSource.lineage` recorded."""
    dataset = Path(lineage["dataset"])
    return dataset if dataset.name == lineage["snapshot"] else dataset / lineage["snapshot"]


def _count_known(source: SequenceSource) -> StoredCounts:
    """Counts the events that training may read, by item, action and surface, one bucket of users at a time."""
    dataset = source.dataset
    items = np.zeros(len(source.catalogue), dtype=np.int64)
    names = {kind: dict.fromkeys(getattr(dataset, f"{kind}s"), 0) for kind in ("action", "surface")}
    for bucket in range(source.num_buckets):
        columns = dict.fromkeys([*source.columns_of_ranges, "item_id", "surface"])
        table = source.read_columns(source.spans_of([bucket]), list(columns))
        chosen = source.ranges_of_users(table).training_events()
        places = find_ids(source.catalogue, numpy_column(table, "item_id")[chosen])
        items += np.bincount(places[places >= 0], minlength=len(items))
        for kind, counts in names.items():
            encoded = encode(table[kind])
            numbers = np.bincount(encoded.indices.to_numpy()[chosen], minlength=len(encoded.dictionary))
            for name, number in zip(encoded.dictionary.to_pylist(), numbers.tolist(), strict=True):
                counts[name] += number
    arrays = {f"{kind}s": np.array(list(counts.values()), dtype=np.int64) for kind, counts in names.items()}
    return StoredCounts({"items": items, **arrays}, {})


def _since_event_before(events: EventTable) -> Column:
    """Returns the seconds between each event and the user's previous event, or `NEVER` for a user's first event."""
    times = events.times
    seconds = np.full(len(times), NEVER)
    seconds[1:] = (times[1:] - times[:-1]) / 1000.0
    seconds[events.offsets[:-1]] = NEVER
    return Column(FLOAT, seconds)


def _known_actions(vocabulary: Vocabulary, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `names`, or all actions if `names` is empty. Raises ConfigError if the dataset lacks a named action."""
    for name in names:
        if name not in vocabulary.actions:
            raise ConfigError(
                f"data.positive_actions names {name!r}, which the dataset does not have",
                allowed=f"actions in the dataset: {', '.join(vocabulary.actions)}",
                fix=did_you_mean(name, vocabulary.actions),
            )
    return names or vocabulary.actions
