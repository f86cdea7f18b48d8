"""The processes that train one model together, and the few things that they tell each other.

A process finds the others by the environment that torchrun, Slurm, Kubernetes and Ray set: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Without these variables the process is alone. Then every method
below does nothing or returns what it was given, so the trainer needs no other code for one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed


@dataclasses.dataclass(frozen=True)
class Peer:
    """Says where an operator finds a process of a run."""

    host: str
    pid: int


@dataclasses.dataclass(frozen=True)
class TrainingWorld:
    """The processes of a run. `rank` numbers this process from 0; the process of rank 0 writes for all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    host_group: Any = None
    """The group for objects and numbers on the CPU (gloo); None if the process is alone."""
    store: Any = None
    """The store in which processes leave notes for each other (meeting.py); None if the process is alone."""
    peers: tuple[Peer, ...] = ()
    """All processes by rank; empty if the process is alone."""
    timeout_s: float = 0.0
    """Seconds for which one process waits for another."""

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files for all."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces a tensor by its sum over all processes, with the same bits everywhere; returns the tensor."""
        if not self.is_alone:
            distributed.all_reduce(tensor, group=self._group_of(tensor))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Returns the values (anything that can be pickled) of all processes, by rank."""
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.host_group)
        return found

    def gather_tensors(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Returns the tensors of all processes, by rank. All have the same type; `lengths` holds their lengths."""
        if self.is_alone:
            return [tensor]
        # Gloo gathers tensors of one shape only, so all are padded to the longest.
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(found, padded, group=self._group_of(tensor))
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """Returns the group that carries a tensor; None means torch's default group."""
        return self.host_group if tensor.device.type == "cpu" else None

    def from_first(self, value: Any) -> Any:
        """Returns the value of the process of rank 0."""
        if self.is_alone:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def wait_for_all(self) -> None:
        """Returns when every process has called this method."""
        if not self.is_alone:
            distributed.barrier(group=self.host_group)

    def for_another_thread(self) -> TrainingWorld:
        """Returns the same processes with connections of their own. All processes call this together.

        If two threads used the same connections, their order could differ between processes, and a thread would receive
        what is meant for the other.
        """
        if self.is_alone:
            return self
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return dataclasses.replace(self, host_group=group)

    @contextlib.contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Lets the process of rank 0 run the block first. The others can then read the files that it wrote."""
        if not self.is_first:
            self.wait_for_all()
        yield
        if self.is_first:
            self.wait_for_all()


ALONE = TrainingWorld()
"""The world of a process that trains by itself."""


def named(ranks: Iterable[int], size: int | None) -> str:
    """Returns the processes of these ranks in words: `process 2 of 4`, `processes 0-2, 5 of 8`.

    If `size` is None, the words do not contain it: `process 2`.
    """
    numbers = sorted(ranks)
    runs: list[str] = []
    for _, members in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        runs += [str(run[0])] if len(run) == 1 else [f"{run[0]}-{run[-1]}"]
    of = "" if size is None else f" of {size}"
    return f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(runs)}{of}"
