"""Pretraining batches: segments of histories, by step number (steps.py says how steps come about).

`TrainingSteps` streams them from disk. `stored_batch` makes one of any runs of events that lie in memory: evaluation's
way, and the slow twin of the windows.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, make_batch
from tackboard.core.config import check
from tackboard.data.index import ItemFrequencies, index_training
from tackboard.data.plan import StepPlan, cut_segments
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource
from tackboard.data.steps import NumberedSteps
from tackboard.data.window import Window
from tackboard.features.column import ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What training reads, and how it is cut into steps."""

    dataset: str
    """Folder of the dataset: datasets/NAME, or one snapshot inside it."""
    features: str = ""
    """File of features of your own, file.py or file.py:name, beside the standard ones; empty for these alone."""
    positive_actions: tuple[str, ...] = ()
    """Actions that the loss predicts and evaluation holds out; empty means all of them."""
    max_length: int = 64
    """Events of the longest training segment."""
    tokens_per_step: int = 4096
    """Events of one step at most, over all processes."""
    window_buckets: int = 16
    """Buckets of the dataset, of about 65,536 events each, that are held in memory and mixed at a time."""
    num_workers: int = 1
    """Threads that prepare windows ahead, each holding one; 0 prepares a window when its first step is due."""
    ray_address: str = ""
    """Ray cluster on which `num_workers` processes prepare the batches: HOST:PORT, or auto; empty: not on a cluster."""

    def __post_init__(self) -> None:
        check(self.max_length >= 2, "data.max_length", self.max_length, "2 or more events")
        check(self.tokens_per_step >= 1, "data.tokens_per_step", self.tokens_per_step, "1 or more events")
        check(self.window_buckets >= 1, "data.window_buckets", self.window_buckets, "1 or more buckets")
        check(0 <= self.num_workers <= 64, "data.num_workers", self.num_workers, "0 to 64")
        is_address = re.fullmatch(r"|auto|[^\s/:]+:\d{1,5}", self.ray_address) is not None
        check(is_address, "data.ray_address", self.ray_address, "HOST:PORT, auto, or empty")


class TrainingSteps(NumberedSteps[SequenceBatch]):
    """Step number → batch of segments, or one rank's share of it."""

    def __init__(
        self,
        source: SequenceSource,
        config: DataConfig,
        hashing: HashConfig,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        quiet: bool = True,
    ) -> None:
        self.source = source
        self.hashing = hashing
        self.max_length = config.max_length
        self.index = index_training(source, config.max_length, quiet=quiet)
        plan = StepPlan(
            self.index.bucket_tokens,
            longest=self.index.longest,
            tokens_per_step=config.tokens_per_step,
            seed=seed,
            buckets_per_window=config.window_buckets,
        )
        super().__init__(plan, rank=rank, world_size=world_size)

    def load_window(self, epoch: int, number: int) -> Window:
        """The segments of a window's buckets, or this rank's share of them, in the epoch's order."""
        sequences = self.source.read(self.plan.buckets_of(epoch, number))
        segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, self.max_length)
        mine, bounds = self.plan.deal(epoch, number, segments.lengths, self.rank, self.world_size)
        return Window(sequences, segments.take(mine), bounds, self.hashing, self.index.frequencies)


def stored_batch(
    sequences: Sequences,
    users: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    hashing: HashConfig,
    frequencies: ItemFrequencies | None = None,
) -> SequenceBatch:
    """The batch of runs of stored events: `lengths` events from index `starts` on, each of the user at `users` [B].

    With `frequencies` it carries what a loss needs: which events are positive, the items' shares, and the features of
    the request before every event. Without, it is what a server would build of these histories, with the features of
    the one request that follows, so that evaluation sees nothing that a request does not hold.
    """
    events = ranges(starts, lengths)
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
    """The event whose request ends each user's history: the held-out one, or the last where none is held out."""
    return np.minimum(sequences.train_ends[users], sequences.offsets[1:][users] - 1)
