"""Multi-hash embedding tables: k hash functions choose one row in each of k sub-tables for an item's vector.

The module takes row ids [M, k], one per sub-table, and returns fp32 vectors [M, k × dim]. Two items share their whole
vector only if they collide under all k functions. For this reason a table far smaller than the catalogue works. The k
sub-tables lie one after another in one parameter. The gradient of this parameter is sparse: only looked-up rows cost
memory and time.

The gradient of a lookup does not go to `weight.grad`. A backward pass appends the looked-up rows and their gradients to
`HashedTables.pending`. The optimiser applies or drops them once it knows whether the step is good
(`train.optimizers.RowWiseAdagrad`). So no sparse tensor is made. The gradient has the precision of the looked-up
vectors, also for a half-precision table (fp16, bf16), where autograd would round it to half precision. Several lookups
and several backward passes add up.

Decided: fresh rows are drawn in place, and half-precision rows block by block, so that making a table never needs room
for a second table. With the same seed, a half-precision table begins as the fp32 table rounded to nearest. The type of
the rows decides how a table is looked up. So a table that was trained in fp32 and stored in fp16 is read in fp16:
`stored_parameters` makes the table without rows and gives it the rows of the file.

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
from tackboard.ops.table_rows import lookup

STORAGES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DRAWN_AT_ONCE = 1 << 22
"""Number of half-precision elements that are drawn at once: a multiple of 16, because torch draws in blocks of 16."""
_rows_device: ContextVar[str | None] = ContextVar("rows_device", default=None)
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


class HashedTables(nn.Module):
    """Holds k sub-tables of `num_rows` × `dim`. The optimiser finds tables by this class and updates single rows."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.num_hashes = config.num_hashes
        self.num_rows = config.num_rows
        self.dim = config.dim
        num_rows = config.num_hashes * config.num_rows
        self.weight = nn.Parameter(_fresh_rows(num_rows, config.dim, config.init_std, STORAGES[config.storage]))
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows [L] and gradients [L, d] of the backward passes since the optimiser's last step."""
        self.first_rows: torch.Tensor
        first_rows = torch.arange(config.num_hashes) * config.num_rows
        self.register_buffer("first_rows", first_rows, persistent=False)

    @property
    def width(self) -> int:
        return self.num_hashes * self.dim

    def forward(self, item_rows_MK: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the vectors [M, D] of items from their rows [M, k], as fp32 or bf16. A negative row reads zeros."""
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
def without_rows() -> Iterator[None]:
    """Inside this context, tables are made without memory: their rows are on the meta device until they are replaced.

    The rest of a model is made as usual, so buffers that no file stores have their values.
    """
    token = _rows_device.set("meta")
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


def _fresh_rows(num_rows: int, dim: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    """Draws normal rows with standard deviation `std`; half-precision rows are the fp32 draws, rounded."""
    rows_Rd = torch.empty(num_rows, dim, dtype=dtype, device=_rows_device.get())
    if rows_Rd.is_meta:
        return rows_Rd
    if dtype == torch.float32:
        return rows_Rd.normal_().mul_(std)
    flat = rows_Rd.view(-1)
    while len(flat):
        # Fewer than 16 remaining numbers join the last block, because torch draws fewer than 16 in another way.
        size = DRAWN_AT_ONCE if len(flat) >= DRAWN_AT_ONCE + 16 else len(flat)
        flat[:size] = torch.empty(size, dtype=torch.float32, device=flat.device).normal_().mul_(std)
        flat = flat[size:]
    return rows_Rd
