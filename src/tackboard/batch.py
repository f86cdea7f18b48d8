"""The jagged batch: where data and models meet.

In: features as columns of the unified representation. Out: tensors. A batch of B histories holds N events packed end
to end and the M distinct items among them; an event names its item by position in that list. So a table row is looked
up once per distinct item, however often the item occurs, and row ids are computed here, when the batch is built, never
inside `forward`.

    offsets  [B+1]  0 ────── 3 ───────────── 7      two histories, of 3 and of 4 events
    items    [N]    0  1  0    2  1  3  2           positions in the distinct items
    item_ids [M]    i₀ i₁ i₂ i₃                     M = 4
    item_rows [M, k]                                one row in each of the k sub-tables

Shapes: B rows (histories), N packed events, M distinct items, k hash functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core.config import check
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.hashing import MAX_ROWS, row_ids
from tackboard.features.column import Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashConfig:
    """How an item id becomes table rows."""

    num_hashes: int = 4
    """Hash functions, and sub-tables: an item's vector is the concatenation of one row of each."""
    num_rows: int = 4096
    """Rows of each sub-table."""
    seed: int = 0
    """Chooses the hash functions; part of the model."""

    def __post_init__(self) -> None:
        check(1 <= self.num_hashes <= 64, "model.hashing.num_hashes", self.num_hashes, "1 to 64")
        check(1 <= self.num_rows <= MAX_ROWS, "model.hashing.num_rows", self.num_rows, f"1 to {MAX_ROWS}")


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """B histories as tensors; see the module's picture.

    `columns` holds the other columns of the history by name [N], `request` the features of the request: one value per
    history [B], or, where a loss predicts every event from what came before it, one per event [N].
    """

    offsets: torch.Tensor
    users: torch.Tensor
    items: torch.Tensor
    columns: dict[str, torch.Tensor]
    request: dict[str, torch.Tensor]
    is_positive: torch.Tensor
    item_ids: torch.Tensor
    item_rows: torch.Tensor
    item_log_q: torch.Tensor

    @property
    def num_rows(self) -> int:
        """B, the number of histories."""
        return len(self.offsets) - 1

    @property
    def num_events(self) -> int:
        """N, the number of events."""
        return len(self.items)

    @property
    def actions(self) -> torch.Tensor:
        """The action of each event, as its position in the vocabulary [N]."""
        return self.column("action")

    @property
    def surfaces(self) -> torch.Tensor:
        """The surface of each event, as its position in the vocabulary [N]."""
        return self.column("surface")

    @property
    def times_ms(self) -> torch.Tensor:
        """The time of each event [N]."""
        return self.column("time")

    def column(self, name: str) -> torch.Tensor:
        """A column of the history [N]. Only what the model's config lists in `reads` is carried."""
        if name not in self.columns:
            carried = ", ".join(f"history.{column}" for column in ("item", *self.columns))
            raise ConfigError(
                f"the model reads history.{name}, which the batch does not carry",
                allowed=f"carried: {carried}",
                fix=f"add history.{name} to `reads` of the model's config",
            )
        return self.columns[name]

    def lengths(self) -> torch.Tensor:
        """Events of each history [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on `device`."""
        moved = {field.name: _move(getattr(self, field.name), device) for field in dataclasses.fields(self)}
        return SequenceBatch(**moved)


def make_batch(
    *,
    history: Column,
    hashing: HashConfig,
    users: NDArray[np.int64] | None = None,
    request: Mapping[str, Column] | None = None,
    is_positive: NDArray[np.bool_] | None = None,
    log_q: Callable[[NDArray[np.int64]], NDArray[np.float32]] | None = None,
) -> SequenceBatch:
    """A batch of B histories: a sequence column with the column `item`, and features of the request.

    `is_positive` [N] marks the events that a loss may predict; none, if not given. `log_q` gives the log of each
    distinct item's share of the training events, for the popularity correction of the loss; 0, if not given. `users`
    [B] tells whose histories they are; 0, if not given.
    """
    fields = dict(history.fields or {})
    item = fields.pop("item")
    offsets = item.offsets if item.offsets is not None else np.zeros(1, dtype=np.int64)
    distinct, items = np.unique(item.values, return_inverse=True)
    frequencies = log_q(distinct) if log_q is not None else np.zeros(len(distinct), dtype=np.float32)
    positive = is_positive if is_positive is not None else np.zeros(len(items), dtype=np.bool_)
    return SequenceBatch(
        offsets=_tensor(offsets),
        users=_tensor(np.zeros(len(history), dtype=np.int64) if users is None else users),
        items=_tensor(items),
        columns={name: feature_tensor(field) for name, field in fields.items()},
        request={name: feature_tensor(column) for name, column in (request or {}).items()},
        is_positive=torch.from_numpy(np.array(positive, dtype=np.bool_, copy=True)),
        item_ids=_tensor(distinct),
        item_rows=item_rows(distinct, hashing),
        item_log_q=torch.from_numpy(np.ascontiguousarray(frequencies, dtype=np.float32)),
    )


def join_batches(one: SequenceBatch, other: SequenceBatch) -> SequenceBatch:
    """The histories of both, one batch after the other; an item of both is in it once."""

    def joined(name: str) -> Any:
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, dict):
            return {key: torch.cat([first[key], second[key]]) for key in first}
        return torch.cat([first, second])

    distinct, place = torch.unique(joined("item_ids"), sorted=True, return_inverse=True)
    # Where an item is in both, its rows and share are the same, so it does not matter which of the two is written.
    rows = one.item_rows.new_empty((len(distinct), one.item_rows.shape[1]))
    log_q = one.item_log_q.new_empty(len(distinct))
    rows[place], log_q[place] = joined("item_rows"), joined("item_log_q")
    return SequenceBatch(
        offsets=torch.cat([one.offsets, other.offsets[1:] + one.offsets[-1]]),
        users=joined("users"),
        items=place[torch.cat([one.items, other.items + len(one.item_ids)])],
        columns=joined("columns"),
        request=joined("request"),
        is_positive=joined("is_positive"),
        item_ids=distinct,
        item_rows=rows,
        item_log_q=log_q,
    )


def feature_tensor(column: Column) -> torch.Tensor:
    """The values of a column as a tensor of its own: int64 for whole numbers, ids and times, bool, else float32.

    A list column gives its elements end to end. What may be missing has to be filled in the language: DataError.
    """
    if column.present is not None and not column.present.all():
        raise DataError(f"a feature of type {column.type} is missing", fix="use .fill_missing(…) in its definition")
    if column.dictionary is not None or column.fields is not None:
        raise DataError(f"a feature of type {column.type} has no tensor", fix="use .hash_id() or .index_in(…)")
    dtype = np.float32 if column.values.dtype.kind == "f" else column.values.dtype
    return torch.from_numpy(np.array(column.values, dtype=dtype, copy=True))


def item_rows(item_ids: NDArray[np.int64], hashing: HashConfig) -> torch.Tensor:
    """Rows of items in each sub-table: int64 [M, k]."""
    return torch.from_numpy(row_ids(item_ids, hashing.num_hashes, hashing.num_rows, hashing.seed))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in value.items()}
    return value.to(device, non_blocking=True)


def _tensor(array: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64, copy=True))
