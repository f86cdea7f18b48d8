"""The contender `tackboard` of `tackboard bench loader` is our training loader, in five variants from simple to final.

memory    keeps the whole dataset in memory and makes every batch with `make_batch`; simple and slow
streamed  reads a window of buckets at a time and makes every batch with `make_batch`
columns   computes the columns of the history once per window, and finds distinct items of a batch by sorting
encoded   computes the table rows of a window's distinct items once, and finds the distinct items of a batch with a
          scratch array
product   computes the table rows of all items once, and reads the stored position of each event's item; this is what
          training does
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import SequenceBatch, item_rows
from tackboard.batch.builder import feature_tensor
from tackboard.bench.loader.data import Setting
from tackboard.core import keyed_random
from tackboard.data.loader import TrainingSteps, stored_batch
from tackboard.data.sequences import Sequences
from tackboard.data.step_plan import Segments, cut_segments
from tackboard.features.column import offsets_of, ranges

VARIANTS = ("memory", "streamed", "columns", "encoded", "product")


class Contender:
    """Our loader in one of the variants. contender.py describes this interface."""

    def __init__(self, folder: Path, variant: str) -> None:
        setting = Setting.read(folder)
        kind = {"streamed": StreamedSteps, "columns": ColumnSteps}.get(variant, TrainingSteps)
        self.setting = setting
        self._steps = kind(setting.open(), setting.config, setting.hashing, setting.seed)
        if variant == "encoded":
            self._steps.forget_positions()
        self._sequences = self._steps.source.read() if variant == "memory" else None

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        if self._sequences is not None:
            return self._in_memory(self._sequences, number)
        steps = range(self._steps.plan.first_step(number), self._steps.plan.first_step(number + 1))
        return (batch for _, batch in self._steps.iterate(steps, num_workers))

    def _in_memory(self, sequences: Sequences, epoch: int) -> Iterator[SequenceBatch]:
        segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, self.setting.max_length)
        segments = segments.take(keyed_random.permutation(len(segments.starts), self.setting.seed, epoch))
        per_epoch = self._steps.plan.steps_per_epoch
        cuts = np.arange(per_epoch + 1) * (self._steps.plan.total_tokens / per_epoch)
        bounds = np.searchsorted(offsets_of(segments.lengths)[:-1], cuts)
        for first, last in itertools.pairwise(bounds.tolist()):
            part = segments.take(np.arange(first, last))
            yield stored_batch(
                sequences, part.users, part.starts, part.lengths, self.setting.hashing, self._steps.index.frequencies
            )


class PlainWindow:
    """A window that computes nothing in advance. Each batch is made from the stored sequences."""

    def __init__(
        self, sequences: Sequences, segments: Segments, bounds: NDArray[np.int64], steps: TrainingSteps
    ) -> None:
        self._sequences, self._segments, self._bounds, self._steps = sequences, segments, bounds, steps

    def batch(self, place: int) -> SequenceBatch:
        """See `Window.batch`."""
        part = self._segments.take(np.arange(self._bounds[place], self._bounds[place + 1]))
        hashing, frequencies = self._steps.hashing, self._steps.index.frequencies
        return stored_batch(self._sequences, part.users, part.starts, part.lengths, hashing, frequencies)


class StreamedSteps(TrainingSteps):
    """Reads windows from disk, and computes nothing in advance for a window."""

    kind: type[PlainWindow | ColumnWindow] = PlainWindow

    def load_window(self, epoch: int, number: int) -> PlainWindow | ColumnWindow:
        """Reads a window and puts its segments in the order of the epoch."""
        sequences = self.source.read(self.plan.buckets_of(epoch, number))
        segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, self.max_length)
        order, bounds = self.plan.deal(epoch, number, segments.lengths)
        return self.kind(sequences, segments.take(order), bounds, self)


class ColumnWindow:
    """A window that computes its columns once. Each batch finds its distinct items by sorting, and hashes the items."""

    def __init__(
        self, sequences: Sequences, segments: Segments, bounds: NDArray[np.int64], steps: TrainingSteps
    ) -> None:
        events = ranges(segments.starts, segments.lengths)
        fields = sequences.histories(segments.starts, segments.lengths).fields or {}
        self._columns = {name: feature_tensor(field) for name, field in fields.items()}
        self._is_positive = torch.from_numpy(sequences.is_positive[events])
        self._users = torch.from_numpy(sequences.user_ids[segments.users])
        self._offsets, self._bounds, self._steps = offsets_of(segments.lengths), bounds, steps

    def batch(self, place: int) -> SequenceBatch:
        """See `Window.batch`."""
        begin, end = int(self._bounds[place]), int(self._bounds[place + 1])
        first, last = int(self._offsets[begin]), int(self._offsets[end])
        columns = {name: values[first:last].clone() for name, values in self._columns.items()}
        distinct, items = np.unique(columns.pop("item").numpy(), return_inverse=True)
        return SequenceBatch(
            offsets=torch.from_numpy(self._offsets[begin : end + 1] - first),
            users=self._users[begin:end].clone(),
            items=torch.from_numpy(items.astype(np.int64, copy=False)),
            columns=columns,
            request={},
            is_positive=self._is_positive[first:last].clone(),
            item_ids=torch.from_numpy(distinct),
            item_rows=item_rows(distinct, self._steps.hashing),
            item_log_q=torch.from_numpy(self._steps.index.frequencies.log_share(distinct)),
        )


class ColumnSteps(StreamedSteps):
    """Reads windows from disk, and computes the columns of each window once."""

    kind = ColumnWindow
