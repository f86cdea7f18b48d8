"""Copies the state of a run to the machine's memory, so that a thread can write it while training goes on.

The input is tensors on any device; the output is copies that nothing changes. Of a table, only the rows that will be
written are copied, block by block, so the device never holds a second table. Copies from a GPU go to pinned memory and
do not wait for each other; `finish` waits for all of them.

Decided: copying also checks that numbers are finite, because it reads everything that will be written. A row that is
not written still has its initial values, which are finite. A table may be given as several blocks of rows. They become
one tensor, or one list of changed rows, whose positions count from the beginning of the whole table.

Shapes: R rows of a block, N rows to be written, d width of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from tackboard.checkpoint.stored_rows import is_smaller, rows_dtype
from tackboard.models.changed_rows import ChangedRows, Stored
from tackboard.ops.fresh_rows import FreshRows

ROWS_AT_ONCE = 1 << 20
"""Number of rows of a table that are processed at once."""
IsChanged = Callable[[slice], torch.Tensor]
"""Takes a slice of a block's rows, and returns a bool tensor that says which of these rows are to be written."""


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Neighbouring rows of a table, from `first_row` of the whole table on."""

    first_row: int
    tensor_Rd: torch.Tensor
    is_changed: IsChanged

    def count(self) -> list[int]:
        """Returns the number of changed rows in each slice. The host waits for the device only once."""
        return count_rows(self.tensor_Rd.shape[0], self.is_changed)


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
        self,
        name: str,
        blocks: Sequence[RowBlock],
        counts: Sequence[list[int]],
        num_rows: int,
        fresh: FreshRows | None,
        *,
        may_be_whole: bool = True,
    ) -> Stored:
        """Returns a copy of the changed rows of a table, given as one or more blocks in ascending order.

        `counts` holds what `RowBlock.count` returned. `num_rows` is the number of rows of the whole table. With
        `may_be_whole`, the whole table is copied if it takes fewer bytes; then the blocks must have all of its rows.
        """
        like, number = blocks[0].tensor_Rd, sum(map(sum, counts))
        if may_be_whole and not is_smaller(number, num_rows, row_bytes(like)):
            return self._joined(name, blocks, num_rows)
        rows_N = self._room(torch.Size((number,)), like, rows_dtype(num_rows))
        values_Nd = self._room(torch.Size((number, *like.shape[1:])), like)
        start = 0
        for block, block_counts in zip(blocks, counts, strict=True):
            for place, count in zip(slices(block.tensor_Rd.shape[0]), block_counts, strict=True):
                if not count:
                    continue
                rows_B = block.is_changed(place).nonzero().view(-1) + place.start
                values_Bd = block.tensor_Rd.detach()[rows_B]
                self._check(name, values_Bd)
                rows_N[start : start + count].copy_(rows_B + block.first_row, non_blocking=True)
                values_Nd[start : start + count].copy_(values_Bd, non_blocking=True)
                start += count
        return ChangedRows(rows_N, values_Nd, num_rows, fresh)

    def _joined(self, name: str, blocks: Sequence[RowBlock], num_rows: int) -> torch.Tensor:
        assert sum(len(block.tensor_Rd) for block in blocks) == num_rows
        like = blocks[0].tensor_Rd
        copy = self._room(torch.Size((num_rows, *like.shape[1:])), like)
        for block in blocks:
            rows_Rd = block.tensor_Rd.detach()
            copy[block.first_row : block.first_row + len(rows_Rd)].copy_(rows_Rd, non_blocking=True)
            for numbers in rows_Rd.flatten().split(ROWS_AT_ONCE):
                self._check(name, numbers)
        return copy

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


def stored_bytes(
    tensor_Rd: torch.Tensor, num_changed: int, num_rows: int | None = None, *, may_be_whole: bool = True
) -> int:
    """Returns the size in bytes of the copy that `Copies.rows` makes.

    `tensor_Rd` holds all rows of the table, or some of its `num_rows` rows.
    """
    num_rows = tensor_Rd.shape[0] if num_rows is None else num_rows
    each = row_bytes(tensor_Rd)
    if may_be_whole and not is_smaller(num_changed, num_rows, each):
        return num_rows * each
    return num_changed * (each + rows_dtype(num_rows).itemsize)
