"""Maps step numbers to batches, which are streamed from disk one window at a time; threads prepare windows ahead.

The content of a batch depends on its step number and never on the number of workers, which only changes how soon
windows are ready. Nearly all the work is done once per window (a part of the data, see step_plan.py): the window is
decoded, its features are computed, and its units are permuted. A batch is then a slice of the window. Memory depends on
the windows, not on the size of the dataset. Decided: workers are threads, not processes, because Arrow and NumPy let
other threads run while they work, and no data has to be sent between processes.
"""

from __future__ import annotations

import abc
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from tackboard.core.errors import UsageError
from tackboard.data.step_plan import StepPlan

Batch = TypeVar("Batch")
Made = TypeVar("Made", covariant=True)
Key = tuple[int, int]
"""An epoch, and the number of a window in this epoch."""


class BatchWindow(Protocol[Made]):
    """A window of the plan, ready to be cut into batches."""

    def batch(self, place: int) -> Made:
        """Returns the batch of step `place` of this window, counted from 0."""


class NumberedSteps(abc.ABC, Generic[Batch]):
    """Maps a step number to its batch, or to one rank's share of that batch."""

    def __init__(self, plan: StepPlan, *, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} processes", allowed="allowed: 0 to processes - 1")
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self._last: tuple[Key, BatchWindow[Batch]] | None = None

    @abc.abstractmethod
    def load_window(self, epoch: int, number: int) -> BatchWindow[Batch]:
        """Reads a window from disk; may be called by several threads at once."""

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise UsageError(f"step {step} does not exist", allowed="allowed: 0 or more, over all epochs")
        epoch, number, place = self.plan.locate(step)
        if self._last is None or self._last[0] != (epoch, number):
            self._last = None  # Free the old window before the new one is made.
            self._last = (epoch, number), self.load_window(epoch, number)
        return self._last[1].batch(place)

    def iterate(self, steps: Iterable[int], num_workers: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yields (step number, batch) for each of `steps`, in order; `num_workers` threads prepare windows ahead."""
        if num_workers == 0:
            yield from ((step, self[step]) for step in steps)
            return
        numbers, ahead = itertools.tee(steps)
        upcoming = (key for key, _ in itertools.groupby(self.plan.locate(step)[:2] for step in ahead))
        waiting: deque[tuple[Key, Future[BatchWindow[Batch]]]] = deque()
        current: tuple[Key, BatchWindow[Batch]] | None = None
        executor = ThreadPoolExecutor(num_workers, thread_name_prefix="window")
        try:
            for step in numbers:
                epoch, number, place = self.plan.locate(step)
                if current is None or current[0] != (epoch, number):
                    current = None
                    for key in itertools.islice(upcoming, num_workers + 1 - len(waiting)):
                        waiting.append((key, executor.submit(self.load_window, *key)))
                    key, future = waiting.popleft()
                    current = key, future.result()
                yield step, current[1].batch(place)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_last": None}
