"""Encodes the tables of a checkpoint, whole or as only their changed rows, and checks tables when they are read.

A tensor NAME is stored whole as NAME, or as two tensors: `NAME:rows` (positions in the whole table, rising, int32 or
int64) and `NAME:values`. A row that still has its initial values is called a fresh row. state.json says for each table
how its fresh rows are made:

    "fresh_rows": {"item_tables.weight": {"key": 1234, "std": 0.1, "num_rows": 8000000}}

Adagrad's running sums of squared gradients (`adagrad.item_tables`, one number per row) are stored for the same rows
and are 0 for all other rows. Decided: the smaller of the two forms is written. If several processes write, each stores
its rows as `NAME:rows` and `NAME:values` in a file of its own (see parts.py), even if the other form is smaller. A file
from outside can be wrong, so positions are checked before any row is written to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tackboard.core.config import convert
from tackboard.core.errors import DataError
from tackboard.models.changed_rows import ChangedRows, Stored
from tackboard.ops.fresh_rows import FreshRows

ROWS, VALUES = ":rows", ":values"
SUMS = "adagrad."
_FIELDS = {"key": int, "std": float, "num_rows": int}
_INT32_ROWS = 1 << 31
_ROWS_AT_ONCE = 1 << 22


def rows_dtype(num_rows: int) -> torch.dtype:
    """Returns the type of positions in a table of `num_rows` rows."""
    return torch.int32 if num_rows <= _INT32_ROWS else torch.int64


def is_smaller(num_changed: int, num_rows: int, row_bytes: int) -> bool:
    """Returns whether the changed rows with their positions take fewer bytes than the whole table."""
    return num_changed * (row_bytes + rows_dtype(num_rows).itemsize) < num_rows * row_bytes


def encode(tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file: a tensor that is given by its changed rows becomes two tensors."""
    encoded: dict[str, torch.Tensor] = {}
    for name, stored in tensors.items():
        if isinstance(stored, ChangedRows):
            encoded |= {name + ROWS: stored.rows_N, name + VALUES: stored.values_Nd}
        else:
            encoded[name] = stored
    return encoded


def decode(tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any]) -> dict[str, Stored]:
    """Does the reverse of `encode`. `described` is `fresh_rows` of state.json; if it does not fit, raises DataError."""
    decoded: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name.endswith(ROWS):
            whole = name.removesuffix(ROWS)
            if whole + VALUES not in tensors:
                raise DataError(f"{whole}{VALUES} is missing")
            decoded[whole] = _changed_rows(whole, tensor, tensors[whole + VALUES], described)
        elif not (name.endswith(VALUES) and name.removesuffix(VALUES) + ROWS in tensors):
            decoded[name] = tensor
    return decoded


def merge(parts: Sequence[Mapping[str, Stored]]) -> dict[str, Stored]:
    """Joins the parts of tensors that several processes have stored. `decode` has read each of the `parts`.

    Raises DataError if the parts of a tensor do not belong together, or if two parts hold the same row.
    """
    found: dict[str, list[ChangedRows]] = {}
    for part in parts:
        for name, stored in part.items():
            if not isinstance(stored, ChangedRows):
                raise DataError(f"the part of {name} has no positions")
            found.setdefault(name, []).append(stored)
    merged: dict[str, Stored] = {}
    for name, (first, *others) in found.items():
        if any((other.shape, other.dtype) != (first.shape, first.dtype) for other in others):
            raise DataError(f"the parts of {name} have different shapes or types")
        merged[name] = dataclasses.replace(first, others=tuple(others))
        _check_disjoint(name, [part.rows_N for part in (first, *others)])
    return merged


def describe(fresh: Mapping[str, tuple[FreshRows, int]]) -> dict[str, Any]:
    """Returns the content of `fresh_rows` in state.json. `fresh` holds (fresh rows, number of rows) of each table."""
    return {name: {"key": rows.key, "std": rows.std, "num_rows": number} for name, (rows, number) in fresh.items()}


def fresh_rows_of(described: Mapping[str, Any], table: str) -> tuple[FreshRows, int]:
    """Returns (fresh rows, number of rows) of a table. `described` is `fresh_rows` of state.json."""
    content = described.get(table)
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise DataError(
            f"cannot read fresh_rows.{table} = {str(content)[:80]}", allowed=f"needed: {', '.join(_FIELDS)}"
        )
    values = {field: convert(content[field], hint, f"fresh_rows.{table}.{field}") for field, hint in _FIELDS.items()}
    is_whole = -(1 << 63) <= values["key"] < 1 << 63 and 0 <= values["num_rows"] < 1 << 48
    if not is_whole or not 0 <= values["std"] < math.inf:
        raise DataError(f"fresh_rows.{table} = {str(content)[:80]} is out of range")
    return FreshRows(values["key"], values["std"]), values["num_rows"]


def _changed_rows(
    name: str, rows_N: torch.Tensor, values_Nd: torch.Tensor, described: Mapping[str, Any]
) -> ChangedRows:
    is_sum = name.startswith(SUMS)
    table = f"{name.removeprefix(SUMS)}.weight".removeprefix(".") if is_sum else name
    fresh, num_rows = fresh_rows_of(described, table)
    num_dimensions = 1 if is_sum else 2
    if rows_N.dim() != 1 or values_Nd.dim() != num_dimensions or len(rows_N) != len(values_Nd):
        raise DataError(f"{name} has {tuple(rows_N.shape)} positions and {tuple(values_Nd.shape)} values")
    if rows_N.dtype != rows_dtype(num_rows) or not values_Nd.is_floating_point():
        raise DataError(f"{name} has positions of type {rows_N.dtype} and values of type {values_Nd.dtype}")
    _check_positions(name, rows_N.split(_ROWS_AT_ONCE), num_rows)
    return ChangedRows(rows_N, values_Nd, num_rows, None if is_sum else fresh)


def _check_positions(name: str, blocks: Iterable[torch.Tensor], num_rows: int) -> None:
    """Raises DataError unless positions rise and lie in the table."""
    last = -1
    for rows_B in blocks:
        if not len(rows_B):
            continue
        if int(rows_B[0]) <= last or not bool((rows_B[1:] > rows_B[:-1]).all()) or int(rows_B[-1]) >= num_rows:
            raise DataError(f"{name}{ROWS} must hold rising positions from 0 to {num_rows - 1}")
        last = int(rows_B[-1])


def _check_disjoint(name: str, parts: Sequence[torch.Tensor]) -> None:
    """Raises DataError if two parts have a position in common. Positions rise, and are compared block by block."""
    starts = [0] * len(parts)
    while any(start < len(rows_N) for start, rows_N in zip(starts, parts, strict=True)):
        blocks = [rows_N[start : start + _ROWS_AT_ONCE] for start, rows_N in zip(starts, parts, strict=True)]
        # All positions up to `last` lie in the blocks.
        last = min(block[-1:] for block in blocks if len(block))
        ends = [int(torch.searchsorted(block, last, right=True)) for block in blocks]
        rows_B = torch.cat([block[:end] for block, end in zip(blocks, ends, strict=True)]).sort().values
        if bool((rows_B[1:] == rows_B[:-1]).any()):
            raise DataError(f"two parts of {name} hold the same row")
        starts = [start + end for start, end in zip(starts, ends, strict=True)]
