"""Batches on the device before they are needed.

On a GPU the next batch is copied from pinned memory on a stream of its own while the present one is computed with. On
a CPU there is nothing to copy, and batches pass through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")


def on_device(batches: Iterable[tuple[int, Batch]], device: torch.device) -> Iterator[tuple[int, Batch]]:
    """The same (step number, batch) pairs with their tensors on `device`; on a GPU the copy runs one batch ahead.

    A batch is valid until the caller asks for the one after it has been used, like any tensor of the current stream.
    """
    if device.type != "cuda":
        for number, batch in batches:
            moved: Any = batch
            yield number, moved.to(device)
        return
    stream = torch.cuda.Stream(device)
    ahead: tuple[int, Any] | None = None
    for number, batch in batches:
        following = (number, _copied(batch, device, stream))
        if ahead is not None:
            yield _taken_over(ahead, stream)
        ahead = following
    if ahead is not None:
        yield _taken_over(ahead, stream)


def _copied(batch: Any, device: torch.device, stream: torch.cuda.Stream) -> Any:
    """`batch` on its way to the device: the copy has been asked for, on `stream`."""
    with torch.cuda.stream(stream):
        return batch.pin_memory().to(device)


def _taken_over(pair: tuple[int, Any], stream: torch.cuda.Stream) -> tuple[int, Any]:
    """Makes the current stream wait for the copy, and its memory wait for the current stream before it is reused."""
    current = torch.cuda.current_stream(stream.device)
    current.wait_stream(stream)
    for tensor in pair[1].tensors():
        tensor.record_stream(current)
    return pair
