"""Multi-hash embedding tables: k hash functions, k sub-tables, one vector by concatenation.

In: row ids [M, k], one per sub-table. Out: vectors [M, k × dim]. Two items share their whole vector only if they
collide under all k functions, which is why a table far smaller than the catalogue works. The k sub-tables lie in one
parameter, sub-table after sub-table. Its gradient is sparse: only looked-up rows move, in memory and in time.

Shapes: M distinct items, k hash functions, D width of the concatenation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tackboard.batch import HashConfig


class HashedTables(nn.Module):
    """k sub-tables of `num_rows` × `dim`. The optimiser finds tables by this class and updates them row-wise."""

    def __init__(self, hashing: HashConfig, dim: int, init_std: float = 0.1) -> None:
        super().__init__()
        self.num_hashes = hashing.num_hashes
        self.num_rows = hashing.num_rows
        self.dim = dim
        self.weight = nn.Parameter(torch.randn(hashing.num_hashes * hashing.num_rows, dim) * init_std)
        self.first_rows: torch.Tensor
        first_rows = torch.arange(hashing.num_hashes) * hashing.num_rows
        self.register_buffer("first_rows", first_rows, persistent=False)

    @property
    def width(self) -> int:
        """Width of an item's vector."""
        return self.num_hashes * self.dim

    def forward(self, item_rows_MK: torch.Tensor) -> torch.Tensor:
        """Vectors [M, D] of items given by their rows [M, k]."""
        vectors_MKd = functional.embedding(item_rows_MK + self.first_rows, self.weight, sparse=True)
        return vectors_MKd.flatten(1)


def table_modules(model: nn.Module) -> dict[str, HashedTables]:
    """The tables a model declares, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HashedTables)}


def table_parameter_names(model: nn.Module) -> set[str]:
    """Names of the parameters that are tables; all others are dense."""
    return {f"{name}.weight" if name else "weight" for name in table_modules(model)}
