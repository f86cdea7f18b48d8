"""Represents a table, or the Adagrad sums of a table, by only the rows that training has changed.

`ChangedRows` holds the positions and values of the changed rows. Every other row still has its first value: a fresh row
(`ops.fresh_rows`), or 0 for sums. Checkpoints store this form. A `ChangedRows` has the shape and type of the whole
table, so it can be compared with a model before memory is allocated. `copy_rows` copies it into a tensor; `copy_range`
copies only a range of rows; `whole` makes the table.

Decided: a small file may stand for a large table, so `whole` compares the size of the table with the free memory first.
Positions are row numbers of the whole table, even if a process trains only a part, so a checkpoint can be resharded.
If several processes have stored parts of one table, the parts stay as they are: they are never joined in memory.

Shapes: R rows of the whole table, N changed rows, d width of a row (sums have no second dimension).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from tackboard.core.errors import DataError
from tackboard.core.machine import available_memory_bytes
from tackboard.ops.fresh_rows import FreshRows

ROWS_AT_ONCE = 1 << 18
"""Number of rows that are copied at once."""


@dataclasses.dataclass(frozen=True)
class ChangedRows:
    """The changed rows of a tensor of `num_rows` rows. `fresh` makes the other rows; None means that they are 0."""

    rows_N: torch.Tensor
    """Positions in ascending order; int32 if all positions of the table fit into int32, otherwise int64."""
    values_Nd: torch.Tensor
    num_rows: int
    fresh: FreshRows | None
    others: tuple[ChangedRows, ...] = ()
    """Further changed rows of the same tensor, which other processes have stored. No row occurs twice."""

    @property
    def parts(self) -> tuple[ChangedRows, ...]:
        """The changed rows of all processes."""
        return (self, *self.others)

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size((self.num_rows, *self.values_Nd.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values_Nd.dtype

    def is_floating_point(self) -> bool:
        """Returns whether the numbers are floating-point numbers, as torch.Tensor does."""
        return self.values_Nd.is_floating_point()

    def numel(self) -> int:
        """Returns the number of elements of the whole tensor."""
        return math.prod(self.shape)

    def whole(self, where: Path, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the whole tensor on a device. Raises DataError with `where` if main memory is too small for it."""
        needed, free = self.numel() * self.values_Nd.itemsize, available_memory_bytes()
        if needed > free and torch.device(device).type == "cpu":
            raise DataError(
                f"{where} holds a table of {' × '.join(map(str, self.shape))}, which needs {needed / 1e9:.1f} GB",
                allowed=f"this machine has {free / 1e9:.1f} GB of free memory",
                fix="use a machine with more memory",
            )
        whole_Rd = torch.empty(self.shape, dtype=self.dtype, device=device)
        copy_rows(self, whole_Rd)
        return whole_Rd


Stored = torch.Tensor | ChangedRows
"""A tensor as it is stored: whole, or as its changed rows."""


@torch.no_grad()
def copy_rows(stored: Stored, target_Rd: torch.Tensor) -> None:
    """Copies a stored tensor into `target_Rd`. No further copy of the whole tensor is made.

    Raises DataError if the two have different shapes.
    """
    if stored.shape != target_Rd.shape:
        raise DataError(f"stored rows have shape {tuple(stored.shape)}, not {tuple(target_Rd.shape)}")
    if isinstance(stored, torch.Tensor):
        target_Rd.copy_(stored)  # `copy_range` needs rows, but this tensor may be a single number.
    else:
        copy_range(stored, target_Rd, 0)


@torch.no_grad()
def copy_range(stored: Stored, target_Rd: torch.Tensor, first_row: int) -> None:
    """Fills `target_Rd` with consecutive rows of a stored tensor, beginning with row `first_row`.

    Raises DataError if the stored tensor has too few rows, or rows of another width.
    """
    end = first_row + target_Rd.shape[0]
    if stored.shape[1:] != target_Rd.shape[1:] or not 0 <= first_row <= end <= stored.shape[0]:
        raise DataError(
            f"stored rows have shape {tuple(stored.shape)}, so rows {first_row} to {end} do not fit into "
            f"{tuple(target_Rd.shape)}"
        )
    if isinstance(stored, torch.Tensor):
        target_Rd.copy_(stored[first_row:end])
        return
    if stored.fresh is None:
        target_Rd.zero_()
    else:
        stored.fresh.fill(target_Rd, first_row, stored.dtype)
    for part in stored.parts:
        own = rows_within(part.rows_N, first_row, end)
        blocks = zip(part.rows_N[own].split(ROWS_AT_ONCE), part.values_Nd[own].split(ROWS_AT_ONCE), strict=True)
        for rows_B, values_Bd in blocks:
            places_B = rows_B.to(target_Rd.device, torch.int64) - first_row
            target_Rd[places_B] = values_Bd.to(target_Rd.device, target_Rd.dtype)


def rows_within(rows_N: torch.Tensor, first_row: int, end: int) -> slice:
    """Returns the slice of `rows_N` (ascending) that holds all of its positions from `first_row` to `end` - 1."""
    if first_row >= end:
        return slice(0, 0)
    # Both limits are positions of the table, so they fit into the type of `rows_N`. `end` itself may not fit.
    low, last = torch.tensor([[first_row], [end - 1]], dtype=rows_N.dtype, device=rows_N.device)
    start, stop = torch.searchsorted(rows_N, low), torch.searchsorted(rows_N, last, right=True)
    return slice(int(start), int(stop))


def whole_tensor(stored: Stored, where: Path, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns a stored tensor as a whole, on a device. On a CPU, a tensor that is stored whole is returned as it is.

    Raises DataError with `where`, the file that the tensor is stored in, if there is too little memory.
    """
    return stored.whole(where, device) if isinstance(stored, ChangedRows) else stored.to(device)
