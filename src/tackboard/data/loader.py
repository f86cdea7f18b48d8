"""Makes pretraining batches from segments of histories. Each batch has a step number (see steps.py).

`TrainingSteps` streams batches from disk, one window at a time. A window consists of several buckets (groups of users).
The columns of the history are computed once per window, and the table rows and frequencies of all items once per run.
The position of each event's item in the catalogue is stored with the dataset (positions.py). So to make a batch, only
its events are copied (`batch.builder.PreparedHistories`). `stored_batch` makes a batch from any ranges of events in
memory; it is slow but simple. Evaluation uses `stored_batch`, and tests compare its batches with the batches of
windows.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.batches import Batch
from tackboard.batch.builder import PreparedHistories, make_batch
from tackboard.batch.items import DistinctItems, ItemTable, coded_items
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import Part, PartOfUsers, StepsConfig
from tackboard.data.index import ItemFrequencies, index_training, segments_of
from tackboard.data.negatives import UniformNegatives
from tackboard.data.positions import ItemPositions, item_positions
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.data.step_plan import StepPlan, runs_of_all
from tackboard.data.steps import BatchWindow, NumberedSteps
from tackboard.data.time_split import Split, TimeSplit, parse_instant, resolve_split, shown_instant
from tackboard.events.dataset import Dataset
from tackboard.features.column import ranges
from tackboard.features.feature_set import FeatureSet
from tackboard.features.standard import only_carries_items

ROW_BYTES = 4
MOST_TABLE_BYTES = 1 << 28
"""If the embedding row numbers of all items need more memory than this, they are not kept for the whole catalogue. Each
window then computes them for the items that occur in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(StepsConfig):
    """Settings for reading segments of histories and cutting them into steps."""

    kind: ClassVar[str] = "segments"
    batch_type: ClassVar[type[Batch]] = SequenceBatch

    positive_actions: tuple[str, ...] = ()
    """Actions that the loss predicts and evaluation holds out; empty means all actions."""
    held_out: int = 1
    """Which positive event of each user is predicted in evaluation, counted from the last: 1 for the test, 2 for
    validation. Later events are not used. Has no effect if data.split is time."""
    split: Split = "last"
    """`last`: evaluation predicts each user's last positive event. `time`: evaluation predicts events from data.cut on,
    and training reads only events that happened and were received before data.cut."""
    cut: str = ""
    """Instant that ends training, such as 2024-05-01 or 2024-05-01T12:00:00Z, or a share of the log's events in the
    order of time, such as 0.9. Empty means 0.9 if data.split is time."""
    validation_hours: float = 0.0
    """Length of the validation slice before the cut, in hours. Training ends where the slice begins, and judgements
    during training predict the events of the slice. Needs data.split=time."""
    predict_from: str = ""
    """Training predicts only events from this instant on; earlier events are context. Empty means all events.
    `tackboard train --continue RUN` sets the instant to the end of RUN."""
    max_length: int = 64
    """Largest number of events in a training segment."""
    segments: str = "all"
    """`all` trains on all training events; `newest` on each user's newest max_length events, as SASRec and HSTU do."""
    uniform_negatives: int = 0
    """Number of items drawn uniformly from the catalogue for each step, as additional negatives. If the number is at
    least the size of the catalogue, the whole catalogue is taken, which makes an exact softmax possible."""
    tokens_per_step: int = 4096
    """Largest number of events in one step, over all processes."""
    window_buckets: int = 16
    """Number of buckets that are in memory and mixed at a time. A bucket is a part of the dataset, of about 65,536
    events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(1 <= self.held_out <= 100, "data.held_out", self.held_out, "1 to 100")
        self._check_split()
        check(self.max_length >= 2, "data.max_length", self.max_length, "2 or more events")
        check(self.segments in ("all", "newest"), "data.segments", self.segments, "all, newest")
        check(self.uniform_negatives >= 0, "data.uniform_negatives", self.uniform_negatives, "0 or more items")
        check(self.tokens_per_step >= 1, "data.tokens_per_step", self.tokens_per_step, "1 or more events")
        check(self.window_buckets >= 1, "data.window_buckets", self.window_buckets, "1 or more buckets")

    def _check_split(self) -> None:
        check(self.split in ("last", "time"), "data.split", self.split, "last, time")
        is_by_time = self.split == "time"
        check(self.validation_hours >= 0, "data.validation_hours", self.validation_hours, "0 or more")
        for name in ("cut", "validation_hours"):
            if getattr(self, name) and not is_by_time:
                raise ConfigError(
                    f"data.{name} is {getattr(self, name)}, but data.split is last",
                    allowed="a cut and a validation slice belong to a split by time",
                    fix="--set data.split=time",
                )
        if self.validation_hours and self.validation_share:
            raise ConfigError(
                "data.validation_hours and data.validation_share are both given",
                allowed="judgements read either the slice before the cut or the events of some users",
                fix="set one of the two to 0",
            )
        if self.predict_from:
            parse_instant(self.predict_from, "data.predict_from")

    def open(
        self,
        features: Callable[[Vocabulary], FeatureSet],
        *,
        dataset: str | Path | Dataset | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> SequenceSource:
        """Opens the histories of the dataset, with the held-out events set apart."""
        return open_sequences(
            dataset or self.dataset,
            self.positive_actions,
            held_out=self.held_out,
            vocabulary=vocabulary,
            features=features,
            time_split=self._time_split if self.split == "time" else None,
            predict_from_ms=parse_instant(self.predict_from, "data.predict_from") if self.predict_from else None,
        )

    def _time_split(self, dataset: Dataset) -> TimeSplit:
        return resolve_split(dataset, self.cut, self.validation_hours)

    def at(self, lineage: Mapping[str, Any]) -> Self:
        """Returns this config with the snapshot and the cut that a run recorded, so the cut does not change."""
        data = super().at(lineage)
        return dataclasses.replace(data, cut=shown_instant(lineage["cut_ms"])) if "cut_ms" in lineage else data

    def steps(
        self,
        source: SequenceSource,
        hashing: HashConfig,
        seed: int,
        *,
        part: Part = "train",
        quiet: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> TrainingSteps:
        """Maps step numbers to batches of segments of one part of the users."""
        return TrainingSteps(source, self, hashing, seed, rank=rank, world_size=world_size, part=part, quiet=quiet)


class Window:
    """Holds the segments of a window in the order of its steps. Step p has the segments bounds[p]:bounds[p + 1].

    If `negatives` is given, each batch also gets uniform negatives. `key` and the step's place determine these items.
    """

    def __init__(
        self,
        segments: PreparedHistories,
        bounds: NDArray[np.int64],
        negatives: UniformNegatives | None = None,
        key: tuple[int, ...] = (),
    ) -> None:
        self._segments, self._bounds, self._negatives, self._key = segments, bounds, negatives, key

    def batch(self, place: int) -> SequenceBatch:
        """Returns the batch of step `place` of this window, counted from 0."""
        batch = self._segments.batch(int(self._bounds[place]), int(self._bounds[place + 1]))
        return batch if self._negatives is None else self._negatives.add(batch, *self._key, place)


class Kept:
    """Holds what a process prepares once for all windows.

    Copies of a `TrainingSteps` in the same process share one `Kept`. In another process, a copy gets an empty `Kept`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.catalogue: tuple[ItemPositions, DistinctItems] | tuple[None, None] | None = None
        self.whole: PreparedHistories | None = None

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


class TrainingSteps(NumberedSteps[SequenceBatch]):
    """Maps a step number to its batch of segments, or to one rank's share of that batch."""

    def __init__(
        self,
        source: SequenceSource,
        config: DataConfig,
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
        self.max_length = config.max_length
        self.newest_only = config.segments == "newest"
        self.seed = seed
        self.uniform_negatives = config.uniform_negatives
        self._quiet = quiet
        self._kept = Kept()
        self.users = PartOfUsers(part, config.validation_share)
        if source.time_split is not None and source.time_split.has_slice:
            self.users = PartOfUsers(is_slice=part == "validation")
        self.index = index_training(
            source, config.max_length, newest_only=self.newest_only, users=self.users, quiet=quiet
        )
        plan = StepPlan(
            self.index.bucket_tokens,
            longest=self.index.longest,
            tokens_per_step=config.tokens_per_step,
            seed=seed,
            buckets_per_window=config.window_buckets,
        )
        super().__init__(plan, rank=rank, world_size=world_size)
        self._items_of_catalogue()

    def load_window(self, epoch: int, number: int) -> BatchWindow[SequenceBatch]:
        """Reads the segments of a window's buckets, or this rank's share of them, in the order of the epoch."""
        # If there is only one window, it is prepared only once. If it were prepared in every epoch, a GPU would wait
        # for data longer than it trains.
        is_only = self.plan.num_windows == 1
        prepared = self._whole if is_only else self._prepare(self.plan.buckets_of(epoch, number))
        # A user's own items are no negatives of any of the user's segments, so one process gets all these segments.
        mine, bounds = self.plan.deal(
            epoch, number, prepared.lengths, self.rank, self.world_size, owners=prepared.users
        )
        return Window(prepared.in_order(mine), bounds, self._negatives, (epoch, number))

    def _prepare(self, buckets: NDArray[np.int64]) -> PreparedHistories:
        """Reads the segments of some buckets and prepares them, so that batches can be cut from them."""
        positions, items = self._items_of_catalogue()
        sequences = self.source.read(buckets, None if positions is None else positions.read)
        segments, is_predicted = segments_of(sequences, self.users, self.max_length, newest_only=self.newest_only)
        codes = sequences.item_ids
        if items is None:
            items, codes = coded_items(sequences.item_ids, self.hashing, self.index.frequencies.log_share)
        return PreparedHistories(
            events=sequences.histories_of(None, runs_of_all(segments, len(codes), self.max_length)),
            starts=segments.starts,
            lengths=segments.lengths,
            users=sequences.user_ids[segments.users],
            request=sequences.request,
            is_positive=is_predicted,
            items=items,
            codes=codes,
        )

    def forget_positions(self) -> None:
        """Makes these steps work without stored positions of items, as if the positions could not be stored."""
        self._kept.catalogue = None, None

    def _items_of_catalogue(self) -> tuple[ItemPositions | None, DistinctItems | None]:
        """Returns the stored positions of items and a table of all items, or (None, None) if they cannot be used."""
        with self._kept.lock:
            if self._kept.catalogue is None:
                self._kept.catalogue = None, None
                num_bytes = len(self.source.catalogue) * self.hashing.num_hashes * ROW_BYTES
                usable = num_bytes <= MOST_TABLE_BYTES and only_carries_items(self.source.features.plan)
                positions = item_positions(self.source, quiet=self._quiet) if usable else None
                if positions is not None:
                    table = ItemTable(self.source.catalogue, self.hashing, self.index.frequencies.log_share)
                    self._kept.catalogue = positions, DistinctItems(table)
            return self._kept.catalogue

    @property
    def _whole(self) -> PreparedHistories:
        """All segments of a dataset that fits in a single window, in the order of the dataset."""
        with self._kept.lock:
            if self._kept.whole is None:
                self._kept.whole = self._prepare(self.plan.buckets_of(0, 0))
            return self._kept.whole

    @functools.cached_property
    def _negatives(self) -> UniformNegatives | None:
        if not self.uniform_negatives:
            return None
        return UniformNegatives(
            self.source.known_items, self.uniform_negatives, self.hashing, self.index.frequencies, self.seed
        )


def stored_batch(
    sequences: Sequences,
    users: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    hashing: HashConfig,
    frequencies: ItemFrequencies | None = None,
    *,
    requests: NDArray[np.int64] | None = None,
) -> SequenceBatch:
    """Makes a batch of B ranges of stored events. Range b has lengths[b] events of user users[b], from starts[b] on.

    If `frequencies` is given, the batch is for a loss. It then has the positive events, the log shares of the items,
    and for each event the features of a request just before the event. If `frequencies` is None, the batch equals the
    batch that a server would build, with the features of the single request that follows the history. So evaluation
    sees only data that a server would see. `requests` [B] holds, for each range, the event at whose time this request
    happens; the default is the user's held-out event.
    """
    events = ranges(starts, lengths)
    if requests is None:
        requests = events if frequencies else ends_of_history(sequences, users)
    return make_batch(
        history=sequences.histories(starts, lengths),
        request={name: column.take(requests) for name, column in sequences.request.items()},
        users=sequences.user_ids[users],
        is_positive=sequences.is_positive[events] if frequencies else None,
        hashing=hashing,
        log_q=frequencies.log_share if frequencies else None,
    )


def ends_of_history(sequences: Sequences, users: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of each user's held-out event, or of the user's last event if none is held out."""
    return np.minimum(sequences.train_ends[users], sequences.offsets[1:][users] - 1)
