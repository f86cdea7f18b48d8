"""Makes numbered steps from a stream of events that is generated on the fly, without a dataset on disk.

`StreamConfig.open` returns a source with everything that training, checkpoints and evaluation need from a dataset, and
`steps` returns numbered batches. The law of the stream (events/synthetic/stream_law.py) says what each user does.

    ids of users    0 ──────── train ──────── (1 − validation_share) · num_users ── validation ── num_users ── test ──

Step n of an epoch has the next `users_per_step` users of its part. Their histories are laid end to end and cut at
exactly `tokens_per_step` events, so every step has the same size. Users are independent of each other, so their order
needs no permutation. Each step is a window of its own: any worker thread can make any step, without the steps before
it. Decided: a hash of the law's settings identifies a stream, as a snapshot's name identifies the data of a dataset. So
a run is not resumed if its stream has changed, just as it is not resumed if its dataset has changed.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.batches import Batch
from tackboard.batch.builder import make_batch
from tackboard.core.config import check, to_dict
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.vocabulary import DEFAULT_ACTION, DEFAULT_SURFACE, Vocabulary
from tackboard.data.config import Part, StepsConfig
from tackboard.data.negatives import UniformNegatives
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource
from tackboard.data.step_plan import StepPlan, share_of_rank
from tackboard.data.steps import NumberedSteps
from tackboard.events.dataset import Dataset
from tackboard.events.synthetic.stream_law import StreamLaw, StreamLawConfig
from tackboard.features.column import Column, offsets_of
from tackboard.features.entity_tables import EventTable, read_source
from tackboard.features.feature_set import FeatureSet
from tackboard.features.standard import HISTORY

HOUR_MS = 3_600_000
FIRST_MS = 1_700_000_000_000
"""Time of each user's first event. Later events follow one hour apart, so times say nothing about items."""
LAW_VERSION = 1
"""Raise the version if a change of the code gives other events for the same settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig(StepsConfig):
    """Settings of a stream and of the steps that it is cut into."""

    kind: ClassVar[str] = "stream"
    batch_type: ClassVar[type[Batch]] = SequenceBatch

    dataset: str = ""
    """Always empty: a stream has no dataset."""
    law: StreamLawConfig = dataclasses.field(default_factory=StreamLawConfig)
    """What users do in the stream."""
    uniform_negatives: int = 0
    """Number of items drawn uniformly from the catalogue for each step, as additional negatives."""
    tokens_per_step: int = 65_536
    """Number of events in one step."""
    evaluated_items: int = 100_000
    """Number of items in the fixed sample of the catalogue that evaluation ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not self.dataset, "data.dataset", self.dataset, "nothing: a stream is made on the fly")
        check(not self.features, "data.features", self.features, "nothing: a stream has only histories")
        check(not self.ray_address, "data.ray_address", self.ray_address, "nothing: threads make a stream")
        check(self.uniform_negatives >= 0, "data.uniform_negatives", self.uniform_negatives, "0 or more items")
        check(self.evaluated_items >= 2, "data.evaluated_items", self.evaluated_items, "2 or more items")
        least = 2 * self.law.max_events
        check(self.tokens_per_step >= least, "data.tokens_per_step", self.tokens_per_step, f"{least} or more events")

    @property
    def max_length(self) -> int:
        """Largest number of events in a history."""
        return self.law.max_events

    def at(self, lineage: Mapping[str, Any]) -> Self:
        """Returns this config unchanged, because `Trainer` checks that the lineage names the same stream."""
        del lineage
        return self

    def open(
        self,
        features: Callable[[Vocabulary], FeatureSet],
        *,
        dataset: str | Path | Dataset | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> StreamSource:
        """Describes the stream as a source. Raises UsageError if `dataset` is a dataset other than this stream."""
        source = StreamSource(self.law, features, vocabulary)
        if dataset is not None and not (isinstance(dataset, Dataset) and dataset.path == source.dataset.path):
            raise UsageError(
                f"{dataset.path if isinstance(dataset, Dataset) else dataset} is a dataset, but the run reads a stream",
                allowed="a run on a stream is evaluated on the held-out users of the same stream",
                fix="leave out --dataset",
            )
        return source

    def steps(
        self,
        source: StreamSource,
        hashing: HashConfig,
        seed: int,
        *,
        part: Part = "train",
        quiet: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> StreamSteps:
        """Maps step numbers to batches of one part of the users."""
        del quiet
        return StreamSteps(source, self, hashing, seed, part, rank=rank, world_size=world_size)


class StreamSource(SequenceSource):
    """Describes a stream as if it were a dataset, and makes the histories of any of its users."""

    def __init__(
        self,
        config: StreamLawConfig,
        features: Callable[[Vocabulary], FeatureSet],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.law = StreamLaw(config)
        settings = {"version": LAW_VERSION, **to_dict(config)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        num_events = round(config.num_users * config.mean_events)
        statistics = {
            "num_events": num_events,
            "num_users": config.num_users,
            "num_items_listed": config.num_items,
            "user_type": "int64",
            "item_type": "int64",
            "actions": {DEFAULT_ACTION: num_events},
            "surfaces": {DEFAULT_SURFACE: num_events},
        }
        path = Path(f"stream-{digest}")
        dataset = Dataset(path, {"name": "stream", "files": []}, statistics)
        super().__init__(dataset, path, held_out=1, vocabulary=vocabulary, features=features)
        if others := [name for name in self.features.plan.features if name != HISTORY]:
            raise ConfigError(
                f"the model reads {', '.join(others)}, but a stream has only histories",
                allowed="allowed: columns of the history",
                fix="turn off model.request_time and model.request_features",
            )
        # The catalogue is a range, because an array of 200 million ids would take 1.6 GB, and nothing reads the ids.
        self.catalogue = range(config.num_items)  # type: ignore[assignment]
        self._names = {
            str(node.params["column"]): read_source(
                pa.chunked_array(
                    [{"action": [DEFAULT_ACTION], "surface": [DEFAULT_SURFACE]}[str(node.params["column"])]]
                ),
                self.features.plan,
                index,
            )
            for index, node in self.features.plan.sources()
            if node.params["column"] in ("action", "surface")
        }
        self._types = {str(node.params["column"]): node.type for _, node in self.features.plan.sources()}

    def lineage(self) -> dict[str, Any]:
        """Returns what a checkpoint records about the origin of its data: the settings of the law."""
        return {**super().lineage(), "dataset": "stream", "law": to_dict(self.law.config)}

    @property
    def trimming(self) -> dict[str, Any]:
        """Names of the event columns that are made. Nothing is read from disk, so nothing is skipped."""
        return {"read": list(self._types), "skipped": [], "bytes": 0, "bytes_saved": 0}

    def over(self, catalogue: NDArray[np.int64]) -> StreamSource:
        """Returns the same source with `catalogue` as its items, for an evaluation that ranks only these items."""
        twin = copy.copy(self)
        twin.catalogue = catalogue
        return twin

    def histories_of(self, users: NDArray[np.int64], num_events: NDArray[np.int64]) -> Sequences:
        """Makes the first num_events[u] events (one or more) of users[u]. The last of these events is held out."""
        offsets = offsets_of(num_events)
        items = self.law.items_of(users, offsets)
        positions = np.arange(len(items)) - np.repeat(offsets[:-1], num_events)
        times = FIRST_MS + HOUR_MS * positions
        values = {"item": items, "time": times, "received": times}
        columns = {
            name: self._names[name].take(np.zeros(len(items), dtype=np.int64))
            if name in self._names
            else Column(type_, values[name])
            for name, type_ in self._types.items()
        }
        return Sequences(
            source=self,
            user_ids=users,
            offsets=offsets,
            is_positive=np.ones(len(items), dtype=np.bool_),
            targets=offsets[1:] - 1,
            item_ids=items,
            events=EventTable(user_ids=users, offsets=offsets, times=times, received=times, columns=columns),
            request={},
        )

    def test_sequences(self, max_users: int | None = None) -> Sequences:
        """Returns the histories of at most `max_users` test users; users with fewer than two events are left out."""
        first = self.law.config.num_users
        users = np.arange(first, first + self.law.config.num_test_users, dtype=np.int64)
        num_events = self.law.num_events(users)
        chosen = np.flatnonzero(num_events > 1)[:max_users]
        return self.histories_of(users[chosen], num_events[chosen])


class StreamPlan(StepPlan):
    """The plan of a stream: every window is one step, and windows follow each other in the order of the users."""

    def __init__(self, num_steps: int, tokens_per_step: int) -> None:
        """An epoch has `num_steps` steps of `tokens_per_step` events."""
        self.num_windows = num_steps
        self.total_tokens = num_steps * tokens_per_step

    def first_step(self, epoch: int) -> int:
        """Returns the number of an epoch's first step."""
        return epoch * self.num_windows

    def locate(self, step: int) -> tuple[int, int, int]:
        """Returns (epoch, window, 0) of step number `step`."""
        return *divmod(step, self.num_windows), 0

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


class _ReadyStep:
    """A window that consists of one step, which is already made."""

    def __init__(self, batch: SequenceBatch) -> None:
        self._batch = batch

    def batch(self, place: int) -> SequenceBatch:
        """Returns the batch; `place` is 0."""
        del place
        return self._batch


class StreamSteps(NumberedSteps[SequenceBatch]):
    """Maps a step number to its batch of histories."""

    def __init__(
        self,
        source: StreamSource,
        config: StreamConfig,
        hashing: HashConfig,
        seed: int,
        part: Part,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        law = config.law
        num_validation = math.floor(config.validation_share * law.num_users)
        self.source = source
        self.hashing = hashing
        self.tokens_per_step = config.tokens_per_step
        self.first_user, num_users = {
            "train": (0, law.num_users - num_validation),
            "validation": (law.num_users - num_validation, num_validation),
            "test": (law.num_users, law.num_test_users),
        }[part]
        # On average, `mean` users fill a step. With six standard deviations more users, nearly every step is full.
        mean = config.tokens_per_step / law.mean_events
        self.users_per_step = math.ceil(mean + 6.0 * math.sqrt(mean))
        num_steps = num_users // self.users_per_step
        if not num_steps:
            raise ConfigError(
                f"{num_users:,} users of the part {part} do not fill one step, which needs {self.users_per_step:,}",
                fix="raise data.law.num_users or data.validation_share, or lower data.tokens_per_step",
            )
        self._negatives = None
        if config.uniform_negatives:
            items = range(law.num_items)
            self._negatives = UniformNegatives(items, config.uniform_negatives, hashing, source.law, seed)
        super().__init__(StreamPlan(num_steps, config.tokens_per_step), rank=rank, world_size=world_size)

    def load_window(self, epoch: int, number: int) -> _ReadyStep:
        """Makes step `number` of an epoch. The epoch decides only the negatives."""
        first = self.first_user + number * self.users_per_step
        users = np.arange(first, first + self.users_per_step, dtype=np.int64)
        ends = np.minimum(np.cumsum(self.source.law.num_events(users)), self.tokens_per_step)
        num_events = np.diff(ends, prepend=0)
        users, num_events = users[num_events > 0], num_events[num_events > 0]
        if self.world_size > 1:
            mine = share_of_rank(num_events, self.rank, self.world_size)
            users, num_events = users[mine], num_events[mine]
        sequences = self.source.histories_of(users, num_events)
        batch = make_batch(
            history=sequences.histories_of(np.arange(len(sequences.item_ids)), sequences.offsets),
            hashing=self.hashing,
            users=users,
            is_positive=sequences.is_positive,
            log_q=self.source.law.log_share,
        )
        return _ReadyStep(batch if self._negatives is None else self._negatives.add(batch, epoch, number))
