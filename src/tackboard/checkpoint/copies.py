"""Copies the state of a run to the machine's memory, so that a thread can write it while training goes on.

The input is tensors on any device; the output is copies that nothing changes. Of a table, only the rows that will be
written are copied, block by block, so the device never holds a second table. Copies from a GPU go to pinned memory and
do not wait for each other; `finish` waits for all of them.

Decided: copying also checks that numbers are finite, because it reads everything that will be written. A row that is
not written still has its initial values, which are finite.

Shapes: R rows of a table, N rows to be written, d width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tackboard.checkpoint.stored_rows import is_smaller, rows_dtype
from tackboard.models.changed_rows import ChangedRows, Stored
from tackboard.ops.fresh_rows import FreshRows

ROWS_AT_ONCE = 1 << 20
"""Number of rows of a table that are processed at once."""
IsChanged = Callable[[slice], torch.Tensor]
"""Takes a slice of a table's rows, and returns a bool tensor that says which of these rows are to be written."""


class Copies:
    """Makes copies of tensors and checks that numbers are finite. `finish` returns the result of the check."""

    def __init__(self) -> None:
        self._is_finite: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def whole(self, name: str, tensor: torch.Tensor, *, must_be_finite: bool = False) -> torch.Tensor:
        """Returns a copy of a tensor."""
        copy = self._room(tensor.shape, tensor)
        copy.copy_(tensor.detach(), non_blocking=True)
        if must_be_finite:
            for numbers in tensor.detach().flatten().split(ROWS_AT_ONCE):
                self._check(name, numbers)
        return copy

    def rows(
        self, name: str, tensor_Rd: torch.Tensor, is_changed: IsChanged, counts: list[int], fresh: FreshRows | None
    ) -> Stored:
        """Returns a copy of the changed rows of a tensor, or of the whole tensor if that is smaller.

        `counts` holds the number of changed rows in each slice, as `count_rows` returns it.
        """
        num_rows, number = tensor_Rd.shape[0], sum(counts)
        if not is_smaller(number, num_rows, row_bytes(tensor_Rd)):
            return self.whole(name, tensor_Rd, must_be_finite=True)
        rows_N = self._room(torch.Size((number,)), tensor_Rd, rows_dtype(num_rows))
        values_Nd = self._room(torch.Size((number, *tensor_Rd.shape[1:])), tensor_Rd)
        start = 0
        for place, count in zip(slices(num_rows), counts, strict=True):
            if not count:
                continue
            rows_B = is_changed(place).nonzero().view(-1) + place.start
            values_Bd = tensor_Rd.detach()[rows_B]
            self._check(name, values_Bd)
            rows_N[start : start + count].copy_(rows_B, non_blocking=True)
            values_Nd[start : start + count].copy_(values_Bd, non_blocking=True)
            start += count
        return ChangedRows(rows_N, values_Nd, num_rows, fresh)

    def finish(self) -> str | None:
        """Waits for all copies. Returns the name of the first tensor with a number that is not finite, or None."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        return next((name for name, is_finite in self._is_finite.items() if not bool(is_finite)), None)

    def _room(self, shape: torch.Size, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if like.is_cuda:
            self._devices.add(like.device)
        return torch.empty(shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)

    def _check(self, name: str, numbers: torch.Tensor) -> None:
        is_finite = torch.isfinite(numbers).all()
        before = self._is_finite.get(name)
        self._is_finite[name] = is_finite if before is None else before & is_finite


def slices(num_rows: int) -> Iterator[slice]:
    """Yields the slices of a table's rows that are processed one after another."""
    for start in range(0, num_rows, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, num_rows))


def count_rows(num_rows: int, is_changed: IsChanged) -> list[int]:
    """Returns the number of changed rows in each slice of a table. The host waits for the device only once."""
    counts = [is_changed(place).count_nonzero() for place in slices(num_rows)]
    return torch.stack(counts).tolist() if counts else []


def row_bytes(tensor_Rd: torch.Tensor) -> int:
    """Returns the size of one row in bytes."""
    return tensor_Rd.itemsize * (tensor_Rd.numel() // max(1, tensor_Rd.shape[0]))


def stored_bytes(tensor_Rd: torch.Tensor, num_changed: int) -> int:
    """Returns the size in bytes of the copy that `Copies.rows` makes."""
    num_rows, each = tensor_Rd.shape[0], row_bytes(tensor_Rd)
    if not is_smaller(num_changed, num_rows, each):
        return num_rows * each
    return num_changed * (each + rows_dtype(num_rows).itemsize)
