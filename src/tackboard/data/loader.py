"""Numbered steps to batches, streamed from disk a window at a time, in this process or in workers.

A worker is handed step numbers and computes each batch from them alone, so the number of workers changes how fast the
batches come and never what is in them. torch's DataLoader moves them between processes. Memory is that of two windows
per worker, however large the dataset. Decided: every worker and every rank decodes all windows and builds only its own
batches. Decoding is the small part, and in return any of them can start anywhere, with nothing to agree on.
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

from tackboard.batch import HashConfig, SequenceBatch, join_batches, make_batch
from tackboard.core.config import check
from tackboard.data.index import ItemFrequencies, index_training
from tackboard.data.plan import StepPlan, cut_segments, share_of_rank
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource
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
    num_workers: int = 0
    """Processes that prepare batches; 0 prepares them in the training process."""

    def __post_init__(self) -> None:
        check(self.max_length >= 2, "data.max_length", self.max_length, "2 or more events")
        check(self.tokens_per_step >= 1, "data.tokens_per_step", self.tokens_per_step, "1 or more events")
        check(self.window_buckets >= 1, "data.window_buckets", self.window_buckets, "1 or more buckets")
        check(0 <= self.num_workers <= 64, "data.num_workers", self.num_workers, "0 to 64")


PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""


class TrainingSteps(torch.utils.data.Dataset[SequenceBatch]):
    """Step number → batch, or one rank's share of it."""

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
        self.rank = rank
        self.world_size = world_size
        self.index = index_training(source, config.max_length, quiet=quiet)
        self.plan = StepPlan(
            self.index.bucket_tokens,
            longest=self.index.longest,
            tokens_per_step=config.tokens_per_step,
            seed=seed,
            buckets_per_window=config.window_buckets,
        )
        self._windows: dict[tuple[int, int], Window] = {}

    def __getitem__(self, step: int) -> SequenceBatch:
        runs = []
        for part in self.plan.parts_of(step):
            window = self._window(part.epoch, part.window)
            runs.append((window, window.between(part.first, part.last)))
        # A step may be empty where segments are long and few; then one empty batch stands for it.
        runs = [(window, run) for window, run in runs if len(run)] or runs[:1]
        lengths = np.concatenate([window.lengths[run.start : run.stop] for window, run in runs])
        mine = share_of_rank(lengths, self.rank, self.world_size) if len(lengths) else lengths
        batches, begin = [], 0
        for window, run in runs:
            batches.append(window.batch(run, mine[(mine >= begin) & (mine < begin + len(run))] - begin))
            begin += len(run)
        return functools.reduce(join_batches, batches)

    def _window(self, epoch: int, number: int) -> Window:
        """A window, of which the two last used are kept: a step may end one and begin the next."""
        key = (epoch, number)
        if key not in self._windows:
            while len(self._windows) > 1:
                self._windows.pop(next(iter(self._windows)))
            sequences = self.source.read(self.plan.buckets_of(epoch, number))
            segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, self.max_length)
            order = self.plan.order_in(epoch, number, len(segments.starts))
            self._windows[key] = Window(sequences, segments.take(order), self.hashing, self.index.frequencies)
        return self._windows[key]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_windows": {}}

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
