"""Defines multi-hash embedding tables: each of k hash functions chooses a row of its own sub-table for an item.

A table takes row ids [M, k], one per sub-table, and returns vectors [M, k × dim] in fp32 or bf16. Two items share
their whole vector only if they collide under all k functions. For this reason a table far smaller than the catalogue
works. The k sub-tables lie one after another in one parameter. The gradient of this parameter is sparse: only looked-up
rows cost memory and time.

The gradient of a lookup does not go to `weight.grad`. A backward pass appends the looked-up rows and their gradients to
`HashedTables.pending`. The optimiser applies or drops them once it knows whether the step is good
(`train.optimizers.RowWiseAdagrad`). So no sparse tensor is made. The gradient has the precision of the looked-up
vectors. In `weight.grad`, the gradient of a half-precision table (fp16, bf16) would be rounded to half precision. The
gradients of several lookups and several backward passes add up.

Decided: the fresh rows, which are the rows before training, are a function of a key and the row's position
(`ops.fresh_rows`). The key is drawn when the table is made. So with the same seed a table begins with the same rows on
any device, and a half-precision table begins as the fp32 table rounded to nearest. In training, only the optimiser
changes rows. So a checkpoint stores only two kinds of rows: those whose Adagrad sum is not 0, and those that differed
from the fresh rows when the run began.

The type of the rows decides how a table is looked up. So a table that was trained in fp32 and stored in fp16 is read in
fp16: `stored_parameters` makes the table without rows and gives it the rows of the file.

Shapes: M distinct items, k hash functions, D width of the concatenation, R rows of all sub-tables, d width of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tackboard.batch import HashConfig
from tackboard.core.config import check
from tackboard.models.table_pieces import Piece
from tackboard.ops.fresh_rows import FreshRows, draw_key
from tackboard.ops.table_rows import lookup

STORAGES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_rows_device: ContextVar[torch.device | str | None] = ContextVar("rows_device", default=None)
"""Device of fresh rows; None means torch's default device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig(HashConfig):
    """The settings of item tables: how an id becomes rows, and the width, first values and precision of the rows."""

    dim: int = 16
    """Width of one sub-table's row; an item's vector is num_hashes times as wide."""
    init_std: float = 0.1
    """Standard deviation of fresh rows."""
    storage: str = "fp32"
    """Precision of stored rows: fp32, fp16 or bf16. Updates of half-precision rows are rounded stochastically."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.dim >= 1, "model.tables.dim", self.dim, "1 or more")
        check(0 <= self.init_std < math.inf, "model.tables.init_std", self.init_std, "0 or more")
        check(self.storage in STORAGES, "model.tables.storage", self.storage, ", ".join(STORAGES))


def halved(config: TableConfig) -> TableConfig:
    """Returns the settings of tables with half the width and twice the rows, so with the same number of parameters.

    A lookup then moves half the bytes, in memory and between processes. Raises ConfigError if the width is odd.
    """
    check(config.dim > 0 and config.dim % 2 == 0, "model.tables.dim", config.dim, "an even number, to be halved")
    return dataclasses.replace(config, dim=config.dim // 2, num_rows=2 * config.num_rows)


class HashedTables(nn.Module):
    """Holds k sub-tables of `num_rows` × `dim`. The optimiser finds tables by this class and updates single rows."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.num_hashes = config.num_hashes
        self.num_rows = config.num_rows
        self.dim = config.dim
        self.fresh = FreshRows(draw_key(), config.init_std)
        """The values of the rows before training. A checkpoint stores the key that makes them."""
        shape = (config.num_hashes * config.num_rows, config.dim)
        rows_Rd = torch.empty(shape, dtype=STORAGES[config.storage], device=_rows_device.get())
        if not rows_Rd.is_meta:
            self.fresh.fill(rows_Rd)
        self.weight = nn.Parameter(rows_Rd)
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows [L] and gradients [L, d] of the backward passes since the optimiser's last step."""
        self.first_rows: torch.Tensor
        first_rows = torch.arange(config.num_hashes) * config.num_rows
        self.register_buffer("first_rows", first_rows, persistent=False)

    @property
    def width(self) -> int:
        return self.num_hashes * self.dim

    @property
    def num_rows_in_all(self) -> int:
        """Number of rows of all sub-tables."""
        return self.num_hashes * self.num_rows

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def pieces(self) -> list[Piece]:
        """All rows as one piece. The optimiser keeps the Adagrad sums."""
        return [Piece(0, self.weight.detach(), None)]

    def forward(self, item_rows_MK: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the vectors [M, D] of items from their row ids [M, k], as fp32 or bf16. A negative id gives zeros."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            vectors_MD: torch.Tensor = _Lookup.apply(self.weight, item_rows_MK, self.first_rows, dtype, self.pending)
            return vectors_MD
        return lookup(self.weight.detach(), item_rows_MK, self.first_rows, dtype)[0]

    def pending_gradient(self) -> torch.Tensor:
        """Returns the sum of the pending gradients as a dense fp32 matrix [R, d]: for tests and small tables."""
        gradient_Rd = torch.zeros(self.weight.shape, device=self.weight.device)
        for rows_L, values_Ld in self.pending:
            gradient_Rd.index_add_(0, rows_L.clamp_min(0), values_Ld.float() * (rows_L >= 0)[:, None])
        return gradient_Rd


class _Lookup(torch.autograd.Function):
    """Looks rows up. The backward pass appends the rows and their gradients to a list; the weight gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_Rd: torch.Tensor,
        item_rows_MK: torch.Tensor,
        first_rows_K: torch.Tensor,
        dtype: torch.dtype,
        pending: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        vectors_MD, rows_L = lookup(weight_Rd, item_rows_MK, first_rows_K, dtype)
        ctx.save_for_backward(rows_L)
        ctx.dim, ctx.pending = weight_Rd.shape[1], pending
        return vectors_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        (rows_L,) = ctx.saved_tensors
        ctx.pending.append((rows_L, gradients[0].reshape(-1, ctx.dim)))
        return None, None, None, None, None


@contextmanager
def rows_on(device: torch.device | str) -> Iterator[None]:
    """Inside this context, the rows of new tables are made on `device`. The rest of a model is made as usual.

    On the device "meta", tables take no memory. Their rows have no values until the rows are replaced.
    """
    token = _rows_device.set(device)
    try:
        yield
    finally:
        _rows_device.reset(token)


def table_modules(model: nn.Module) -> dict[str, HashedTables]:
    """Returns the tables of a model, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HashedTables)}


def table_parameter_names(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that are tables; all others are dense."""
    return {f"{name}.weight" if name else "weight" for name in table_modules(model)}
