"""Brings batches to the device before they are needed.

On a GPU one thread reads batches, and a second thread prepares the next batch and copies it from pinned memory on a
separate CUDA stream, while the GPU computes with the current batch. Threads are needed because a trainer that reads its
loss waits for the GPU. Without threads, the trainer would begin to make the next batch only after that wait. On a CPU
there is nothing to copy, and batches pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")


def on_device(
    batches: Iterable[tuple[int, Batch]],
    device: torch.device,
    prepare: Callable[[int, Any], Any] | None = None,
) -> Iterator[tuple[int, Batch]]:
    """Yields the same (step number, batch) pairs with their tensors on `device`; on a GPU two batches are made ahead.

    `prepare` takes a step number and its batch on the CPU, and returns the batch to move.
    """
    if device.type != "cuda":
        for number, batch in batches:
            moved: Any = batch if prepare is None else prepare(number, batch)
            yield number, moved.to(device)
        return
    remaining = iter(batches)
    stream = torch.cuda.Stream(device)

    def read() -> tuple[int, Any] | None:
        return next(remaining, None)

    def fetch(reading: Future[tuple[int, Any] | None]) -> tuple[int, Any, torch.cuda.Event] | None:
        if (pair := reading.result()) is None:
            return None
        with torch.cuda.stream(stream):
            batch = pair[1] if prepare is None else prepare(*pair)
            copied = batch.pin_memory().to(device)
            return pair[0], copied, stream.record_event()

    with ThreadPoolExecutor(1, "read") as readers, ThreadPoolExecutor(1, "prefetch") as executor:
        future, reading = executor.submit(fetch, readers.submit(read)), readers.submit(read)
        while (fetched := future.result()) is not None:
            future, reading = executor.submit(fetch, reading), readers.submit(read)
            number, copied, event = fetched
            current = torch.cuda.current_stream(device)
            current.wait_event(event)
            for tensor in copied.tensors():
                # The memory of a tensor may be reused for a later copy only when the current stream is done with it.
                tensor.record_stream(current)
            yield number, copied
