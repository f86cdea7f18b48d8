"""Defines the pieces of a table: the blocks of rows that one process holds, with their weights and Adagrad sums.

A process that trains alone holds a table as one piece with all rows. Otherwise each process holds some pieces, and the
pieces of all processes together have every row once. A piece has whole rows. The code that saves and loads a table
works on its pieces, so it serves one process and many.

Shapes: R rows of a piece, d width of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from tackboard.ops.fresh_rows import FreshRows


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a table. The tensors are views: a change of them changes the table."""

    first_row: int
    """Position of the first row in the whole table."""
    rows_Rd: torch.Tensor
    """The weights."""
    sums_R: torch.Tensor | None
    """The Adagrad sums; None if the table is frozen or its optimiser keeps them elsewhere."""


@runtime_checkable
class TableInPieces(Protocol):
    """A table of which this process holds some pieces, perhaps none."""

    fresh: FreshRows
    """The values of the rows before training."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of this process, by `first_row`."""

    @property
    def num_rows_in_all(self) -> int:
        """Number of rows of the whole table."""

    @property
    def dim(self) -> int:
        """Width of a row."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters and buffers. A table that processes share has its whole shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes | {name: (table.num_rows_in_all, table.dim) for name, table in tables_in_pieces(model).items()}


def tables_in_pieces(model: nn.Module) -> dict[str, TableInPieces]:
    """Returns the tables of a model, by the names that their weights have in a checkpoint."""
    return {
        f"{name}.weight".removeprefix("."): module
        for name, module in model.named_modules()
        if isinstance(module, TableInPieces)
    }
