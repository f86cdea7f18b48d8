"""Prepares numbered steps on the CPUs of a Ray cluster and streams them to the trainers.

This module takes a step plan (which divides the data into windows, see step_plan.py), step numbers and a cluster. Any
number of trainers get their (step number, batch) pairs, bit for bit the same as if one process had prepared them. Ray
Data distributes the work, keeps its order, limits the amount of data in flight, and repeats the work of a worker that
dies. This is the path of the data:

    tasks        window 7 │ window 2 │ window 5     of the plan, each with the numbers of its steps
    workers      read a window, build every trainer's share of each of its steps
    blocks       [rank 0: steps 0-19] [rank 1: steps 0-19] [rank 0: steps 20-39] …       one row per block
    trainers     block i goes to trainer i modulo the number of trainers, in order

Decided: a worker builds the shares of all trainers, so that a window is decoded once in the whole cluster, not once per
trainer. Tensors travel as safetensors bytes in an Arrow column. Ray decides which trainer gets a block. So each row
names the trainer for which it was made, and a trainer raises an error if it gets a row of another trainer.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from numpy.typing import NDArray

from tackboard.batch import Jagged, RequestBatch, SequenceBatch
from tackboard.batch.batches import Batch
from tackboard.core.errors import CorruptFileError, DataError, TackboardError, UsageError
from tackboard.core.manifest import read_manifest
from tackboard.data.loader import TrainingSteps
from tackboard.data.request_loader import RequestSteps, RequestTable
from tackboard.data.sequences import Sequences
from tackboard.data.source import Codes

Steps = TrainingSteps | RequestSteps
BLOCK_BYTES = 4 << 20
"""A worker adds steps to its blocks until rank 0's block has this many bytes, because each block costs Ray some ms."""
PREFETCHED_BLOCKS = 4
"""Number of blocks that are fetched to a trainer's machine before the trainer asks for them."""
CONNECT_TIMEOUT_S = 5.0
OUTLINE = "outline"
CARRIED = {kind.__name__: kind for kind in (SequenceBatch, RequestBatch, Jagged)}


class ClusterSteps:
    """Maps step numbers to batches that a Ray cluster prepares."""

    def __init__(self, steps: Steps, address: str) -> None:
        """Joins the cluster at `address`, HOST:PORT or `auto`. Each worker gets a copy of `steps`.

        Create this object before a trainer sets its signal handlers, because Ray sets its own when it joins. Raises
        UsageError if Ray is not installed or no cluster answers.
        """
        join_cluster(address)
        self._steps = _for_workers(steps)

    def iterate(self, steps: Iterable[int], num_workers: int) -> Iterator[tuple[int, Any]]:
        """Yields (step number, batch) for a single trainer in the order of `steps`, like `NumberedSteps.iterate`."""
        return iter(self.split(steps, num_workers, world_size=1)[0])

    def split(self, steps: Iterable[int], num_workers: int, world_size: int) -> list[StepShare]:
        """Returns one share of the batches for each of `world_size` trainers, which must all iterate at the same time.

        A share can be sent to the Ray task or actor that trains. The share works only while the process that called
        `split` runs. If `num_workers` is 0, one worker prepares the batches.
        """
        import ray

        numbers = list(steps)
        num_workers = max(1, num_workers)
        if (num_cpus := int(ray.cluster_resources().get("CPU", 0))) < num_workers:
            raise UsageError(
                f"data.num_workers is {num_workers}, but the Ray cluster has {num_cpus} CPUs",
                allowed="allowed: at most one worker for each CPU",
                fix=f"--set data.num_workers={max(1, num_cpus)}, or add machines with: ray start --address=HOST:PORT",
            )
        tasks = [pa.table({"step": pa.array(task, pa.int64())}) for task in tasks_of(self._steps, numbers)]
        dataset = ray.data.from_blocks(tasks).map_batches(
            StepWorker,
            batch_size=None,
            batch_format="pyarrow",
            fn_constructor_args=(ray.put(self._steps), world_size),
            compute=ray.data.ActorPoolStrategy(size=num_workers),
            num_cpus=1,
        )
        dataset.context.execution_options.preserve_order = True
        # With this limit of one byte per block, Ray makes a separate block of every row.
        dataset.context.target_max_block_size = 1
        dataset.context.enable_progress_bars = False
        shares = dataset.streaming_split(world_size)
        return [StepShare(share, numbers, rank) for rank, share in enumerate(shares)]


class StepShare:
    """Holds the batches of one trainer. Iterating over this object yields (step number, batch)."""

    def __init__(self, blocks: Any, numbers: list[int], rank: int) -> None:
        """`blocks` is a ray.data.DataIterator."""
        self._blocks = blocks
        self._numbers = numbers
        self._rank = rank
        self.num_bytes = 0
        """Bytes of tensors received so far."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for expected, (step, rank, tensors) in zip(self._numbers, self._rows(), strict=True):
            if (step, rank) != (expected, self._rank):
                raise TackboardError(f"Ray gave step {step} of rank {rank}, not step {expected} of rank {self._rank}")
            self.num_bytes += len(tensors)
            yield step, batch_from_bytes(tensors)

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        import ray

        if not self._numbers:
            return
        blocks = self._blocks.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=PREFETCHED_BLOCKS)
        try:
            for block in blocks:
                for row in range(block.num_rows):
                    rank = block["rank"][row].as_py()
                    for step, tensors in zip(block["steps"][row], block["tensors"][row], strict=True):
                        yield step.as_py(), rank, tensors.as_py()
        except ray.exceptions.RayError as error:
            raise _explain(error) from None


class StepWorker:
    """Prepares batches in a worker process. Ray creates one object per worker and calls it with a window's steps."""

    def __init__(self, steps: Any, world_size: int) -> None:
        """`steps` is a Ray object reference to the numbered steps."""
        self._reference = steps
        self._world_size = world_size
        self._shares: list[Steps] = []

    def __call__(self, task: pa.Table) -> Iterator[pa.Table]:
        # The steps are opened here, because an error in `__init__` would reach the trainer only as a dead worker.
        if not self._shares:
            import ray

            self.open(ray.get(self._reference))
        numbers: list[int] = []
        batches: list[list[bytes]] = [[] for _ in self._shares]
        for step in task["step"].to_pylist():
            numbers.append(step)
            for share, row in zip(self._shares, batches, strict=True):
                row.append(batch_to_bytes(share[step]))
            if sum(map(len, batches[0])) >= BLOCK_BYTES:
                yield from _rows_of(numbers, batches)
                numbers, batches = [], [[] for _ in self._shares]
        if numbers:
            yield from _rows_of(numbers, batches)

    def open(self, steps: Steps) -> None:
        """Prepares a copy of `steps` for every rank. Raises DataError if this machine lacks the trainer's snapshot."""
        check_same_snapshot(steps)
        source: Any = SharedReads(steps.source)
        for rank in range(self._world_size):
            share = copy.copy(steps)
            share.source, share.rank, share.world_size = source, rank, self._world_size
            self._shares.append(share)


class SharedReads:
    """A source that keeps its last read of events and of requests, so that the shares of all ranks need one read."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._kept: dict[str, tuple[list[int], Any]] = {}

    def read(self, buckets: NDArray[np.int64], codes: Codes | None = None) -> Sequences:
        """Does the same as `SequenceSource.read`."""
        sequences: Sequences = self._shared("events", buckets, lambda: self._source.read(buckets, codes))
        return sequences

    def read_requests(self, buckets: NDArray[np.int64]) -> RequestTable:
        """Does the same as `RequestSource.read_requests`."""
        requests: RequestTable = self._shared("requests", buckets, lambda: self._source.read_requests(buckets))
        return requests

    def _shared(self, kind: str, buckets: NDArray[np.int64], read: Callable[[], Any]) -> Any:
        kept = self._kept.get(kind)
        if kept is None or kept[0] != buckets.tolist():
            self._kept.pop(kind, None)  # Free the old rows before the new ones are read.
            self._kept[kind] = kept = buckets.tolist(), read()
        return kept[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def join_cluster(address: str) -> None:
    """Connects this process to a Ray cluster, unless the process is already connected to a cluster."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise UsageError(
            f"data.ray_address is {address}, but Ray is not installed", fix="make install GROUP=ray"
        ) from None
    if ray.is_initialized():
        return
    try:
        if address != "auto":
            # This quick check comes first, because Ray itself would try to connect for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster answers at data.ray_address = {address}: {str(error).splitlines()[0]}",
            allowed="allowed: HOST:PORT, or auto for the cluster of this machine",
            fix="start a cluster with: .venv/bin/ray start --head --port=6379",
        ) from None


def tasks_of(steps: Steps, numbers: list[int]) -> list[list[int]]:
    """Splits step numbers into tasks, without changing their order. A task holds successive steps of one window."""
    return [list(task) for _, task in itertools.groupby(numbers, key=lambda step: steps.plan.locate(step)[:2])]


def check_same_snapshot(steps: Steps) -> None:
    """Raises DataError unless this machine has the same manifest as the snapshot that the trainer has opened."""
    dataset = steps.source.dataset
    fix = "put the dataset on storage that every machine of the cluster mounts at the same path"
    try:
        found = read_manifest(dataset.path)
    except CorruptFileError as error:
        raise DataError(f"worker on {socket.gethostname()}: {error.got}", fix=fix) from None
    if found != dataset.manifest:
        raise DataError(
            f"worker on {socket.gethostname()}: {dataset.path} is not the snapshot that the trainer reads", fix=fix
        )


def batch_to_bytes(batch: Batch) -> bytes:
    """Writes a batch as safetensors. Its tensors are numbered, and a JSON outline says where each tensor belongs."""
    tensors: list[torch.Tensor] = []
    outline = bytearray(json.dumps(_outline(batch, tensors)).encode())
    named = {str(number): tensor.contiguous() for number, tensor in enumerate(tensors)}
    return safetensors.torch.save({OUTLINE: torch.frombuffer(outline, dtype=torch.uint8), **named})


def batch_from_bytes(data: bytes) -> Any:
    """Reads the batch that `batch_to_bytes` wrote."""
    tensors = safetensors.torch.load(data)
    return _rebuilt(json.loads(tensors.pop(OUTLINE).numpy().tobytes()), tensors)


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Describes a tensor by its number, a dictionary by its values, any other object by its class and attributes."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, dict):
        return {name: _outline(part, tensors) for name, part in value.items()}
    return [type(value).__name__, _outline(vars(value), tensors)]


def _rebuilt(outline: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(outline, int):
        return tensors[str(outline)]
    if isinstance(outline, dict):
        return {name: _rebuilt(part, tensors) for name, part in outline.items()}
    name, parts = outline
    return CARRIED[name](**_rebuilt(parts, tensors))


def _rows_of(numbers: list[int], tensors: list[list[bytes]]) -> Iterator[pa.Table]:
    for rank, batches in enumerate(tensors):
        yield pa.table(
            {
                "rank": pa.array([rank], pa.int64()),
                "steps": pa.array([numbers], pa.list_(pa.int64())),
                "tensors": pa.array([batches], pa.list_(pa.large_binary())),
            }
        )


def _for_workers(steps: Steps) -> Steps:
    """Returns a copy of `steps` for other machines, with an absolute path of the dataset and without cached parts."""
    sent, source = copy.copy(steps), copy.copy(steps.source)
    source.dataset = dataclasses.replace(source.dataset, path=source.dataset.path.resolve())
    for name in ("catalogue", "judge"):
        vars(source).pop(name, None)
    vars(sent).pop("_negatives", None)
    sent.source = source
    return sent


def _explain(error: Exception) -> Exception:
    """Returns the error to raise for a Ray error: the worker's own error, or an error about the cluster."""
    import ray

    inner: BaseException = error
    while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None:
        inner = cause
    if isinstance(inner, TackboardError):
        # A new error is made, because the message lost its line breaks on the way between processes.
        return type(inner)(inner.got, allowed=inner.allowed, fix=inner.fix)
    if isinstance(inner, ray.exceptions.RayError) and not isinstance(inner, ray.exceptions.RayTaskError):
        return UsageError(
            f"the Ray cluster stopped sending batches: {type(inner).__name__}: {str(inner).strip().splitlines()[0]}",
            allowed="the checkpoints are intact; Ray replaces workers that die, but not the machine of the trainer",
            fix="repair the cluster and continue with --resume auto",
        )
    return error
