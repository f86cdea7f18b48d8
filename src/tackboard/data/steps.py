"""Numbered steps to batches, streamed from disk a window at a time, in this process or in workers.

A worker is handed step numbers and computes each batch from them alone, so the number of workers changes how fast the
batches come and never what is in them. torch's DataLoader moves them between processes. Memory is that of two windows
per worker, however large the dataset. Decided: every worker and every rank decodes all windows and builds only its own
batches. Decoding is the small part, and in return any of them can start anywhere, with nothing to agree on.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.data.plan import StepPlan, share_of_rank

Batch = TypeVar("Batch")
Made = TypeVar("Made", covariant=True)
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""


class BatchWindow(Protocol[Made]):
    """Units (segments, requests) in the order in which they are read; `lengths` are their tokens."""

    lengths: NDArray[np.int64]

    def between(self, first: float, last: float) -> range:
        """The units that begin at a token from `first` on and before `last`."""

    def batch(self, units: range, chosen: NDArray[np.int64] | None = None) -> Made:
        """The batch of a run of units, or of those at the positions `chosen` in it."""


class NumberedSteps(torch.utils.data.Dataset[Batch], Generic[Batch]):
    """Step number → batch, or one rank's share of it."""

    def __init__(self, plan: StepPlan, *, rank: int = 0, world_size: int = 1) -> None:
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self._windows: dict[tuple[int, int], BatchWindow[Batch]] = {}

    def load_window(self, epoch: int, number: int) -> BatchWindow[Batch]:
        """Reads a window from disk."""
        raise NotImplementedError

    def join(self, one: Batch, other: Batch) -> Batch:
        """Two batches as one."""
        raise NotImplementedError

    def __getitem__(self, step: int) -> Batch:
        runs = []
        for part in self.plan.parts_of(step):
            window = self._window(part.epoch, part.window)
            runs.append((window, window.between(part.first, part.last)))
        # A step may be empty where units are long and few; then one empty batch stands for it.
        runs = [(window, run) for window, run in runs if len(run)] or runs[:1]
        lengths = np.concatenate([window.lengths[run.start : run.stop] for window, run in runs])
        mine = share_of_rank(lengths, self.rank, self.world_size) if len(lengths) else lengths
        batches, begin = [], 0
        for window, run in runs:
            batches.append(window.batch(run, mine[(mine >= begin) & (mine < begin + len(run))] - begin))
            begin += len(run)
        return functools.reduce(self.join, batches)

    def iterate(
        self, steps: Iterable[int], num_workers: int, *, pin_memory: bool = False
    ) -> Iterator[tuple[int, Batch]]:
        """(step number, batch) for each of `steps`, in that order, prepared by `num_workers` processes.

        With `pin_memory` batches lie where a GPU can copy them by itself.
        """
        numbers = list(steps)
        with warnings.catch_warnings():
            # More workers than cores is the user's choice, and changes nothing but the speed.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: torch.utils.data.DataLoader[Batch] = torch.utils.data.DataLoader(
                self,
                batch_size=None,
                sampler=numbers,
                num_workers=num_workers,
                prefetch_factor=4 if num_workers else None,
                collate_fn=_unchanged,
                pin_memory=pin_memory,
                worker_init_fn=functools.partial(_end_with_trainer, os.getpid()),
            )
            batches = iter(loader)
        yield from zip(numbers, batches, strict=True)

    def _window(self, epoch: int, number: int) -> BatchWindow[Batch]:
        """A window, of which the two last used are kept: a step may end one and begin the next."""
        key = (epoch, number)
        if key not in self._windows:
            while len(self._windows) > 1:
                self._windows.pop(next(iter(self._windows)))
            self._windows[key] = self.load_window(epoch, number)
        return self._windows[key]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_windows": {}}


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
