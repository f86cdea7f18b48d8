"""Replays training steps as CUDA graphs, so that the host does not start each kernel of a step again and again.

The module takes a function that computes a whole step from a batch: loss, gradients, verdict and updates. It returns
what this function returns. A step of a small model consists of hundreds of small kernels, and starting them takes the
host longer than the GPU needs to run them. A CUDA graph is recorded once for each shape of batch. From then on the host
copies a batch into the graph's own tensors and starts all kernels with one call:

    first step of a shape      run as usual; whatever is compiled or tuned is compiled and tuned now
    second step of a shape     recorded, then replayed
    later steps                replayed

A replayed step uses the same kernels as a step that runs as usual, so both give the same bits. Dropout is a function
of the generator's seed, which the caller sets before each step. Numbers that differ from step to step must be in
tensors. Models declare that they keep this rule (`can_replay`), and only such models are replayed. Their batches must
be padded to sizes that repeat.

Decided: all graphs share one pool of memory, so they need the memory of the largest step, not of all steps. If torch
refuses to record a step, the run goes on without graphs and says so once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from tackboard.batch.batches import Batch
from tackboard.core.progress import say

MAX_GRAPHS = 16
"""Largest number of shapes that are recorded. Steps of further shapes run as usual."""

Outcome = tuple[torch.Tensor, Mapping[str, Any]]
"""The packed verdict of a step, and its metrics."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded step: its graph, the tensors that it reads, and the tensors that it writes."""

    graph: Any
    batch: Batch
    outcome: Outcome


class StepReplay:
    """Runs steps as CUDA graphs. `recording` is a context in which the optimisers may be recorded."""

    def __init__(self, compute: Callable[[Any], Outcome], recording: Callable[[], AbstractContextManager[Any]]) -> None:
        self._compute = compute
        self._recording = recording
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.is_on = True
        """Whether steps are still recorded. It is off after torch has refused to record a step."""

    @property
    def num_graphs(self) -> int:
        return len(self._recorded)

    def forget(self) -> None:
        """Drops all recorded steps, because tensors that they read or write are replaced."""
        self._recorded.clear()
        self._seen.clear()

    def __call__(self, batch: Batch) -> Outcome:
        """Computes the step of a batch. The metrics are valid until the next step."""
        key = shape_of(batch)
        if key not in self._recorded:
            is_new = key not in self._seen
            self._seen.add(key)
            if is_new or not self.is_on or self.num_graphs >= MAX_GRAPHS or not self._record(key, batch):
                return self._compute(batch)
        recorded = self._recorded[key]
        for own, given in zip(recorded.batch.tensors(), batch.tensors(), strict=True):
            own.copy_(given, non_blocking=True)
        recorded.graph.replay()
        verdict, metrics = recorded.outcome
        return verdict.clone(), metrics  # The next replay overwrites the verdict, and the host reads it later.

    def _record(self, key: Hashable, batch: Batch) -> bool:
        """Records the step of this shape; returns False if torch refuses."""
        own = batch.cloned()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy batches and checkpoints meanwhile. A recording in the default mode would forbid this.
            with self._recording(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outcome = self._compute(own)
        except RuntimeError as error:
            self.is_on = False
            reason = str(error).split("\n", maxsplit=1)[0]
            say(f"warning: steps are not replayed as CUDA graphs, because one could not be recorded: {reason}")
            return False
        self._recorded[key] = Recorded(graph, own, outcome)
        return True


def shape_of(batch: Batch) -> Hashable:
    """Returns what a recorded step depends on, other than the numbers in tensors."""
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in batch.tensors())
    layout = getattr(batch.targets, "layout", None)
    return shapes, batch.num_padding > 0, None if layout is None else layout.replay_key
