"""Makes ranking batches. A batch holds requests with their candidates and labels, and the history before each request.

This module takes a labelled snapshot (requests.parquet and events.parquet, see request_layout.py) and returns numbered
`RequestBatch`es. The history of a request is assembled when the request is read: the newest `max_history` events that
had been received strictly before the request. A batch holds the history of a request once, however many candidates the
request has, and the table rows of each distinct item once. On the device, the model computes with each history once
and repeats the result for each candidate. Every event of a history and every candidate counts as one token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.batch import HashConfig, RequestBatch
from tackboard.batch.batches import Batch
from tackboard.batch.builder import make_requests
from tackboard.batch.items import coded_items
from tackboard.core import keyed_random
from tackboard.core.config import check, did_you_mean
from tackboard.core.documents import blaming
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.progress import Progress
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import Part, PartOfUsers, StepsConfig
from tackboard.data.index import LONG, ItemFrequencies
from tackboard.data.labels import RequestKeys, first_of_requests
from tackboard.data.request_layout import PSEUDO
from tackboard.data.sequences import Sequences
from tackboard.data.source import ReadCounters, SequenceSource, snapshot_path
from tackboard.data.step_plan import StepPlan
from tackboard.data.steps import NumberedSteps
from tackboard.data.stored_counts import StoredCounts, counted_once
from tackboard.events.columns import one_array
from tackboard.events.dataset import LABEL, REQUESTS, Dataset, open_dataset
from tackboard.events.layout import RowReader
from tackboard.events.schema import numpy_column, starts_of_users
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column, offsets_of, ranges
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.entity_tables import find_ids, load_entities
from tackboard.features.feature_set import FeatureSet
from tackboard.features.plan import Plan
from tackboard.features.standard import HISTORY, by_level, check_finite, history_stride, standard_features
from tackboard.features.views import View, Visibility

EVENTS_AT_ONCE = 1 << 21
"""Largest number of history events that `Histories.tokens` counts at a time."""
DRAW_STREAM = 42
"""Random stream of the draw of requests, separate from all other uses of the seed."""
MAX_HISTORY = 16_000
"""Number of events per user that the sequence store keeps by default; a request may not read more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestConfig(StepsConfig):
    """Settings for reading requests with labelled candidates (`tackboard data label`) and cutting them into steps."""

    kind: ClassVar[str] = "requests"
    batch_type: ClassVar[type[Batch]] = RequestBatch

    labels: tuple[str, ...] = ()
    """Actions whose labels are read; empty means all labelled actions."""
    positive_actions: tuple[str, ...] = ()
    """Actions of the history that a next-token loss may predict; empty means all actions."""
    max_history: int = 256
    """Largest number of events that are read as the history of a request; must equal the model's max_history."""
    validation_share: float = 0.1
    """Share of the users, chosen by their ids, whose requests are used for validation and not for training."""
    test_share: float = 0.1
    """Share of the users whose requests only `tackboard evaluate` reads."""
    judged_on: str = ""
    """Folder of another labelled dataset. If given, the validation and test users (validation_share and test_share) are
    chosen from its users, and training uses all users of `dataset`."""
    max_requests: int = 0
    """Largest number of requests to train with, drawn at random by the run's seed; 0 means no limit."""
    tokens_per_step: int = 65_536
    """Largest number of tokens (events of histories, and candidates) in one step, over all processes."""
    window_buckets: int = 4
    """Number of buckets of the dataset, of about 65,536 events each, that are in memory and mixed at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = 1.0 - self.validation_share
        check(0.0 <= self.test_share <= rest, "data.test_share", self.test_share, f"0 to {rest:g}, the other users")
        check(self.max_requests >= 0, "data.max_requests", self.max_requests, "0 or more")
        is_kept = 1 <= self.max_history <= MAX_HISTORY
        check(is_kept, "data.max_history", self.max_history, f"1 to {MAX_HISTORY:,} events")
        check(self.tokens_per_step >= 1, "data.tokens_per_step", self.tokens_per_step, "1 or more")
        check(self.window_buckets >= 1, "data.window_buckets", self.window_buckets, "1 or more buckets")

    def open(
        self,
        features: Callable[[Vocabulary], FeatureSet] | None,
        *,
        dataset: str | Path | Dataset | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> RequestSource:
        """Opens the labelled requests of the dataset and the histories before them."""
        return RequestSource(self, dataset=dataset, vocabulary=vocabulary, features=features)

    def steps(
        self,
        source: RequestSource,
        hashing: HashConfig,
        seed: int,
        *,
        part: Part = "train",
        quiet: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> RequestSteps:
        """Maps step numbers to batches of requests of one part of the users."""
        if part != "train" and self.judged_on:
            source = source.judge
        return RequestSteps(source, self, hashing, seed, rank=rank, world_size=world_size, part=part, quiet=quiet)

    def at(self, lineage: Mapping[str, Any]) -> Self:
        """Returns this config with the snapshots that a run recorded, including the snapshot of `judged_on`."""
        data = super().at(lineage)
        if not self.judged_on or "judged_snapshot" not in lineage:
            return data
        judged = {"dataset": lineage["judged_on"], "snapshot": lineage["judged_snapshot"]}
        return dataclasses.replace(data, judged_on=str(snapshot_path(judged)))

    def users(self, part: Part) -> PartOfUsers:
        """Returns the rule that selects the users of `part`, in the dataset that this part is read from."""
        if part == "train" and self.judged_on:
            return PartOfUsers()
        return PartOfUsers(part, self.validation_share, self.test_share)


@dataclasses.dataclass(frozen=True)
class RequestTable:
    """Holds R requests with C candidates in total. Candidates offsets[r]:offsets[r + 1] belong to request r.

    A label is 1, 0, or -1 if it is not known yet. `ids` holds the request ids, or is None if no feature needs them.
    """

    ids: pa.Array | None
    user_ids: NDArray[np.int64]
    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    weights: NDArray[np.float32]
    labels: dict[str, NDArray[np.int8]]

    @classmethod
    def from_arrow(cls, table: pa.Table, labels: list[str]) -> RequestTable:
        """Reads rows of requests.parquet. Raises DataError if the lists of a request differ in length."""
        lengths = pc.list_value_length(table["item_id"]).to_numpy()
        for name in ("position", "weight", *(LABEL + label for label in labels)):
            if not np.array_equal(pc.list_value_length(table[name]).to_numpy(), lengths):
                raise DataError(f"the lists of {name} and of item_id differ in length")
        positions = _flat(table, "position")
        return cls(
            ids=one_array(table["request"]) if "request" in table.column_names else None,
            user_ids=numpy_column(table, "user_id"),
            times=numpy_column(table, "time_ms"),
            offsets=offsets_of(lengths.astype(np.int64)),
            item_ids=_flat(table, "item_id").to_numpy(zero_copy_only=False),
            positions=positions.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64),
            weights=_flat(table, "weight").to_numpy(zero_copy_only=False),
            labels={name: _flat(table, LABEL + name).fill_null(-1).to_numpy(zero_copy_only=False) for name in labels},
        )

    def take(self, chosen: NDArray[np.bool_]) -> RequestTable:
        """Returns the requests whose entry in `chosen` [R] is True, with their candidates."""
        if chosen.all():
            return self
        counts = np.diff(self.offsets)
        of_candidates = np.repeat(chosen, counts)
        return RequestTable(
            ids=None if self.ids is None else self.ids.filter(pa.array(chosen)),
            user_ids=self.user_ids[chosen],
            times=self.times[chosen],
            offsets=offsets_of(counts[chosen]),
            item_ids=self.item_ids[of_candidates],
            positions=self.positions[of_candidates],
            weights=self.weights[of_candidates],
            labels={name: label[of_candidates] for name, label in self.labels.items()},
        )


class RequestSource(SequenceSource):
    """Reads a labelled snapshot: its events, its requests, and the features that a model reads."""

    def __init__(
        self,
        config: RequestConfig,
        *,
        dataset: str | Path | Dataset | None = None,
        vocabulary: Vocabulary | None = None,
        features: Callable[[Vocabulary], FeatureSet] | None = None,
    ) -> None:
        """`features` takes a vocabulary and returns the features that the model reads; None means the standard history.

        `dataset` replaces the dataset of the config. A `Dataset` that is already open is not verified again.
        """
        named = dataset.path if isinstance(dataset, Dataset) else Path(dataset or config.dataset)
        dataset = dataset if isinstance(dataset, Dataset) else open_dataset(named)
        if not (dataset.path / REQUESTS).exists() or "requests" not in dataset.layout.offsets:
            raise DataError(
                f"{named} holds no labelled requests",
                allowed=f"if the log does not say what was shown: tackboard data pseudo-requests {named} --per-user 4",
                fix=f"tackboard data label {named} --label ACTION=WINDOW",
            )
        chosen = features or (lambda names: standard_features(names, config.max_history))
        super().__init__(
            dataset,
            named,
            held_out=0,
            positive_actions=config.positive_actions,
            vocabulary=vocabulary,
            features=chosen,
            of_requests=True,
        )
        self.labels = _known_labels(dataset.path / REQUESTS, config.labels)
        self.max_history = config.max_history
        self.anchor_stride = history_stride(self.features)
        self._config = config
        self.request_counters = ReadCounters()
        """Counts the rows and bytes of requests that were read; `counters` does the same for the events."""
        others = [name for name in self.features.plan.features if name != HISTORY]
        self._plan = self.features.plan.trimmed(others) if others else None
        self._of_entities = load_entities(dataset, self._plan) if self._plan is not None else (None, None)

    @functools.cached_property
    def judge(self) -> RequestSource:
        """The source that reads the dataset named by `data.judged_on`. It has the vocabulary and the features of this
        source, and it is opened once."""
        config = dataclasses.replace(self._config, dataset=self._config.judged_on, judged_on="")
        return RequestSource(config, vocabulary=self.vocabulary, features=lambda _names: self.features)

    def lineage(self) -> dict[str, Any]:
        """Returns what a checkpoint records about the origin of its data, including data.judged_on."""
        lineage = super().lineage()
        if self._config.judged_on:
            lineage |= {"judged_on": str(self.judge.path), "judged_snapshot": self.judge.snapshot}
        return lineage

    def read_requests(self, buckets: NDArray[np.int64]) -> RequestTable:
        """Reads the requests of the users of `buckets`, which are in ascending order."""
        names = ["user_id", "time_ms", "item_id", "position", "weight", *(LABEL + name for name in self.labels)]
        if self._plan is not None and context_sources(self._plan):
            names.append("request")
        spans = [self.dataset.layout.rows_of("requests", int(bucket)) for bucket in buckets]
        with contextlib.closing(RowReader(self.dataset.path / REQUESTS)) as reader:
            table = reader.read(spans, names)
            self.request_counters.add(num_rows=table.num_rows, num_bytes=reader.bytes_read)
        with blaming(self.dataset.path / REQUESTS):
            return RequestTable.from_arrow(table, self.labels)

    def compute(self, sequences: Sequences, requests: RequestTable) -> dict[str, Column]:
        """Computes all features except the history; each has one value per request, or one value per candidate."""
        if self._plan is None:
            return {}
        rows = RequestRows(
            user_ids=requests.user_ids,
            request_ms=requests.times,
            item_ids=requests.item_ids,
            request_of=np.repeat(np.arange(len(requests.times), dtype=np.int64), np.diff(requests.offsets)),
            context=self._contexts(self._plan, requests),
        )
        users, items = self._of_entities
        columns = BatchExecutor(self._plan, events=sequences.events, users=users, items=items).compute(rows)
        check_finite(self.features, columns)
        return columns

    def _contexts(self, plan: Plan, requests: RequestTable) -> dict[str, Column]:
        """Returns the context of each request, taken from the request's first event that has a context."""
        if requests.ids is None or not self.dataset.has_context:
            return {}
        buckets = np.unique(self.dataset.layout.buckets_of(requests.user_ids))
        events = self.read_columns(self.spans_of(buckets), ["user_id", "request", "context"])
        events = events.filter(events["context"].is_valid())
        keys = RequestKeys(pa.table({"user_id": requests.user_ids, "request": requests.ids}), events)
        texts = first_of_requests(one_array(events["context"]), keys.of_events, keys.of_impressions)
        return context_columns(plan, texts)


Choose = Callable[[RequestTable], NDArray[np.bool_]]
"""Takes R requests and returns, for each request, whether it is used [R]."""


class Histories:
    """Finds the newest events that requests may see, in arrays that hold the events of all users end to end."""

    def __init__(
        self,
        received: NDArray[np.int64],
        times: NDArray[np.int64],
        user_ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        source: RequestSource,
    ) -> None:
        self._visibility = Visibility(received, offsets)
        self._times, self._user_ids = times, user_ids
        self._max_history, self._stride = source.max_history, source.anchor_stride

    def view(self, user_ids: NDArray[np.int64], request_ms: NDArray[np.int64]) -> View:
        """Returns the newest events that were received strictly before each request. If the history has anchors
        (`events.anchored`), the returned events begin at the request's anchor."""
        view = self._visibility.view(find_ids(self._user_ids, user_ids), request_ms, self._max_history)
        if self._stride == 1:
            return view.newest(self._max_history)
        return view.anchored(self._times, self._max_history, self._stride)

    def tokens(self, requests: RequestTable) -> NDArray[np.int64]:
        """Returns the number of history events plus candidates of each request. Works in parts to bound memory."""
        lengths = np.diff(requests.offsets)
        at_once = max(1, EVENTS_AT_ONCE // self._max_history)
        for first in range(0, len(lengths), at_once):
            part = slice(first, first + at_once)
            lengths[part] += self.view(requests.user_ids[part], requests.times[part]).lengths
        return lengths


class RequestWindow:
    """Holds the requests of some buckets, in the order of the window's steps, and the events of their histories."""

    def __init__(
        self,
        source: RequestSource,
        buckets: NDArray[np.int64],
        deal: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]],
        hashing: HashConfig,
        choose: Choose,
    ) -> None:
        """`deal` takes each request's number of tokens. It returns the order of requests and where each step starts."""
        self._sequences = source.read(buckets)
        found = source.read_requests(buckets)
        self._requests = found.take(choose(found))
        events = self._sequences.events
        self._histories = Histories(
            events.received, events.times, self._sequences.user_ids, self._sequences.offsets, source
        )
        self._order, self._bounds = deal(self._histories.tokens(self._requests))
        self._num_events = len(self._sequences.item_ids)
        item_ids = np.concatenate([self._sequences.item_ids, self._requests.item_ids])
        # A next-token loss needs the share of each item. The shares in the window are an estimate.
        shares = ItemFrequencies.of(self._sequences.item_ids[self._sequences.is_positive])
        self._items, self._codes = coded_items(item_ids, hashing, shares.log_share)
        columns = source.compute(self._sequences, self._requests)
        self._of_requests, self._of_candidates = by_level(source.features, columns)

    def batch(self, place: int) -> RequestBatch:
        """Returns the batch of step `place` of this window, counted from 0."""
        rows = self._order[self._bounds[place] : self._bounds[place + 1]]
        table = self._requests
        view = self._histories.view(table.user_ids[rows], table.times[rows])
        events = view.events_of_rows() if len(rows) else np.zeros(0, dtype=np.int64)
        counts = np.diff(table.offsets)[rows]
        candidates = ranges(table.offsets[:-1][rows], counts)
        codes = np.concatenate([self._codes[events], self._codes[self._num_events + candidates]])
        return make_requests(
            history=self._sequences.histories_of(events, offsets_of(view.lengths)),
            items=self._items.of(codes),
            request_of=np.repeat(np.arange(len(rows), dtype=np.int64), counts),
            users=table.user_ids[rows],
            request_ms=table.times[rows],
            request={name: column.take(rows) for name, column in self._of_requests.items()},
            is_positive=self._sequences.is_positive[events],
            features={name: column.take(candidates) for name, column in self._of_candidates.items()},
            positions=table.positions[candidates],
            weights=table.weights[candidates],
            labels={name: label[candidates] for name, label in table.labels.items()},
        )


class RequestSteps(NumberedSteps[RequestBatch]):
    """Maps a step number to its batch of requests, or to one rank's share of that batch."""

    def __init__(
        self,
        source: RequestSource,
        config: RequestConfig,
        hashing: HashConfig,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        part: Part = "train",
        quiet: bool = True,
    ) -> None:
        self.source = source
        self.hashing = hashing
        self.users, self._seed = config.users(part), seed
        self._highest_draw: np.uint64 | None = None
        if part == "train" and config.max_requests:
            self._highest_draw = self._draw_of_request(config.max_requests)
        drawn = [seed, int(self._highest_draw)] if self._highest_draw is not None else None
        choice = {"users": dataclasses.asdict(self.users), "drawn": drawn}
        tokens, longest = count_tokens(source, self.chosen, choice, quiet=quiet)
        plan = StepPlan(
            tokens,
            longest=longest,
            tokens_per_step=config.tokens_per_step,
            seed=seed,
            buckets_per_window=config.window_buckets,
            longest_setting="data.max_history",
        )
        super().__init__(plan, rank=rank, world_size=world_size)

    def load_window(self, epoch: int, number: int) -> RequestWindow:
        """Reads the requests of a window's buckets, or this rank's share of them, in the order of the epoch."""

        def deal(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            return self.plan.deal(epoch, number, lengths, self.rank, self.world_size)

        return RequestWindow(self.source, self.plan.buckets_of(epoch, number), deal, self.hashing, self.chosen)

    def chosen(self, requests: RequestTable) -> NDArray[np.bool_]:
        """Returns, for each request, whether it belongs to these steps [R]."""
        chosen = self.users.of(requests.user_ids)
        if self._highest_draw is not None:
            chosen &= self._draws(requests) <= self._highest_draw
        return chosen

    def _draws(self, requests: RequestTable) -> NDArray[np.uint64]:
        return keyed_random.bits(self._seed, DRAW_STREAM, requests.user_ids, requests.times)

    def _draw_of_request(self, number: int) -> np.uint64 | None:
        """Returns the `number`-th smallest draw of the requests that belong to these steps.

        Returns None if there are at most `number` such requests, because then all of them are used.
        """
        draws = [
            self._draws(table)[self.chosen(table)]
            for bucket in range(self.source.num_buckets)
            for table in [self.source.read_requests(np.array([bucket]))]
        ]
        every = np.concatenate(draws)
        return None if number >= len(every) else np.partition(every, number - 1)[number - 1]


def count_tokens(
    source: RequestSource, choose: Choose, choice: Mapping[str, Any], *, quiet: bool = True
) -> tuple[NDArray[np.int64], int]:
    """Returns the number of tokens in each bucket and in the largest request. The counts are made once and stored.

    `choice` holds all settings that decide which requests `choose` selects.
    """
    settings = {"kind": "requests", "max_history": source.max_history, **choice}
    if source.anchor_stride > 1:
        settings["anchor_stride"] = source.anchor_stride
    counts = counted_once(
        source.dataset,
        settings,
        lambda: _pass_over(source, choose, quiet=quiet),
        lambda found: (
            [*found.arrays] == ["bucket_tokens"]
            and len(found.arrays["bucket_tokens"]) == source.num_buckets
            and 1 <= found.figures["longest"] <= found.arrays["bucket_tokens"].sum()
        ),
    )
    return counts.arrays["bucket_tokens"], counts.figures["longest"]


def _pass_over(source: RequestSource, choose: Choose, *, quiet: bool) -> StoredCounts:
    """Counts the tokens in one pass over the requests and their histories, one bucket at a time."""
    layout = source.dataset.layout
    tokens, longest = np.zeros(layout.num_buckets, dtype=np.int64), 0
    num_events = source.dataset.num_events
    with Progress("indexing", total=num_events, unit="events", quiet=quiet or num_events < LONG) as progress:
        for bucket in range(layout.num_buckets):
            # Only the choice of anchors needs the times of events. Without anchors, `time_ms` is not read.
            time = "time_ms" if source.anchor_stride > 1 else "received_ms"
            table = source.read_columns(source.spans_of([bucket]), sorted({"user_id", "received_ms", time}))
            users = numpy_column(table, "user_id")
            starts = starts_of_users(users)
            offsets = np.append(starts, len(users)).astype(np.int64)
            received, times = numpy_column(table, "received_ms"), numpy_column(table, time)
            histories = Histories(received, times, users[starts], offsets, source)
            requests = source.read_requests(np.array([bucket]))
            lengths = histories.tokens(requests.take(choose(requests)))
            tokens[bucket], longest = lengths.sum(), max(longest, int(lengths.max(initial=0)))
            progress.advance(table.num_rows)
    if not tokens.any():
        raise DataError(
            f"{source.dataset.path} holds no requests of these users",
            fix="label a snapshot in which something was shown, or change data.validation_share and data.test_share",
        )
    return StoredCounts({"bucket_tokens": tokens}, {"longest": longest})


def _flat(table: pa.Table, name: str) -> pa.Array:
    """Returns all elements of a list column, end to end."""
    return one_array(table[name]).flatten()


def _fix_for_label(path: Path, name: str) -> str:
    """Returns the command that adds a label to the requests in the file `path`."""
    if (path.parent / PSEUDO).exists():
        return f"tackboard data pseudo-requests … --also {name}"
    return f"tackboard data label … --label {name}=WINDOW"


def _known_labels(path: Path, names: tuple[str, ...]) -> list[str]:
    """Returns `names`, or all labels if `names` is empty. Raises ConfigError if the file lacks a named label."""
    with contextlib.closing(RowReader(path)) as reader:
        known = [name.removeprefix(LABEL) for name in reader.schema.names if name.startswith(LABEL)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"data.labels names {name!r}, which the dataset does not have",
                allowed=f"labels in the dataset: {', '.join(known)}",
                fix=did_you_mean(name, known) or _fix_for_label(path, name),
            )
    return list(names) or known
