"""Several ranks as threads of one process: `TrainingWorld` without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tackboard.parallel.training_world import TrainingWorld


class ThreadWorld(TrainingWorld):
    """A rank that meets the others in the memory of this process."""

    def meet(self, barrier: threading.Barrier, box: list[Any]) -> ThreadWorld:
        object.__setattr__(self, "_barrier", barrier)
        object.__setattr__(self, "_box", box)
        return self

    def gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(10)
        found = list(self._box)
        self._barrier.wait(10)
        return found

    def gather_tensors(self, tensor: torch.Tensor, lengths: Any) -> list[torch.Tensor]:
        found = self.gather(tensor)
        assert [len(part) for part in found] == list(lengths)
        return found

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(dim=0))


def _in_ranks(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """Returns what `work` returns in each of `size` ranks; raises the first error."""
    barrier, box = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadWorld(rank=rank, size=size).meet(barrier, box))
        except BaseException as error:  # noqa: BLE001 - raised below.
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def in_ranks() -> Callable[[int, Callable[[Any], Any]], list[Any]]:
    """`in_ranks(3, work)` calls `work(world)` in each of three ranks and returns the results by rank."""
    return _in_ranks
