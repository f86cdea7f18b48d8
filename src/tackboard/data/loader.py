"""Numbered steps to batches, in this process or in workers.

A worker is handed step numbers and computes each batch from them alone, so the number of workers changes how fast the
batches come and never what is in them. torch's DataLoader moves them between processes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, make_batch
from tackboard.core.config import check
from tackboard.core.errors import DataError
from tackboard.data.plan import StepPlan, cut_segments
from tackboard.data.sequences import Sequences
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
    num_workers: int = 0
    """Processes that prepare batches; 0 prepares them in the training process."""

    def __post_init__(self) -> None:
        check(self.max_length >= 2, "data.max_length", self.max_length, "2 or more events")
        check(self.tokens_per_step >= 1, "data.tokens_per_step", self.tokens_per_step, "1 or more events")
        check(0 <= self.num_workers <= 64, "data.num_workers", self.num_workers, "0 to 64")


PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""


class ItemFrequencies:
    """Each item's share of the positive training events, for the popularity correction of the loss."""

    def __init__(self, item_ids: NDArray[np.int64]) -> None:
        self._ids, counts = np.unique(item_ids, return_counts=True)
        self._log_share = np.log(counts / max(1, len(item_ids))).astype(np.float32)
        # An item met only as input (never as a positive) is as rare as half an event.
        self._log_unseen = np.float32(np.log(0.5 / max(1, len(item_ids))))

    def log_share(self, item_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log of the share of each of `item_ids`."""
        if len(self._ids) == 0:
            return np.full(len(item_ids), self._log_unseen)
        position = np.minimum(np.searchsorted(self._ids, item_ids), len(self._ids) - 1)
        return np.where(self._ids[position] == item_ids, self._log_share[position], self._log_unseen)


class TrainingSteps(torch.utils.data.Dataset[SequenceBatch]):
    """Step number → batch."""

    def __init__(self, sequences: Sequences, config: DataConfig, hashing: HashConfig, seed: int) -> None:
        self.sequences = sequences
        self.hashing = hashing
        self.segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, config.max_length)
        if len(self.segments.starts) == 0:
            raise DataError(
                f"{config.dataset} has no event to train on",
                allowed="each user's last positive event is held out for evaluation",
                fix="use users with at least two events",
            )
        self.plan = StepPlan(self.segments.lengths, tokens_per_step=config.tokens_per_step, seed=seed)
        events = sequences.training_events()
        positives = events[sequences.is_positive[events]]
        if len(positives) == 0:
            raise DataError(
                f"{config.dataset} has no positive event to train on",
                allowed="each user's last positive event is held out for evaluation",
                fix="name more actions in data.positive_actions, or use users with at least two positive events",
            )
        self.frequencies = ItemFrequencies(sequences.item_ids[positives])

    def __getitem__(self, step: int) -> SequenceBatch:
        chosen = self.plan.segments_of(step)
        segments = self.segments
        return stored_batch(
            self.sequences,
            segments.users[chosen],
            segments.starts[chosen],
            segments.lengths[chosen],
            self.hashing,
            self.frequencies,
        )

    def iterate(self, steps: Iterable[int], num_workers: int) -> Iterator[tuple[int, SequenceBatch]]:
        """(step number, batch) for each of `steps`, in that order, prepared by `num_workers` processes."""
        numbers = list(steps)
        with warnings.catch_warnings():
            # More workers than cores is the user's choice, and changes nothing but the speed.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: torch.utils.data.DataLoader[SequenceBatch] = torch.utils.data.DataLoader(
                self,
                batch_size=None,
                sampler=numbers,
                num_workers=num_workers,
                prefetch_factor=4 if num_workers else None,
                collate_fn=_unchanged,
                worker_init_fn=functools.partial(_end_with_trainer, os.getpid()),
            )
            batches = iter(loader)
        yield from zip(numbers, batches, strict=True)


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


def _end_with_trainer(trainer: int, _worker: int) -> None:
    """Called in a worker as it starts: makes it end when the process `trainer` does.

    torch looks for that every five seconds, and never finds it where the trainer was killed while the worker started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != trainer:
        os._exit(1)


def _unchanged(batch: Any) -> Any:
    return batch
