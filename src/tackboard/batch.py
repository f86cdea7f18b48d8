"""The jagged batch: where data and models meet.

In: features as columns of the unified representation. Out: tensors. A batch of B histories holds N events packed end
to end and the M distinct items among them; an event names its item by position in that list. So a table row is looked
up once per distinct item, however often the item occurs, and row ids are computed here, when the batch is built, never
inside `forward`.

    offsets  [B+1]  0 ────── 3 ───────────── 7      two histories, of 3 and of 4 events
    items    [N]    0  1  0    2  1  3  2           positions in the distinct items
    item_ids [M]    i₀ i₁ i₂ i₃                     M = 4
    item_rows [M, k]                                one row in each of the k sub-tables
    sampled  [K]    1  3                            items drawn at random as negatives, whether or not an event has them

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
    method: str = "mix"
    """`mix` hashes ids; `modulo` takes the remainder: a plain table, for ids that are small numbers already."""

    def __post_init__(self) -> None:
        check(1 <= self.num_hashes <= 64, "model.hashing.num_hashes", self.num_hashes, "1 to 64")
        check(1 <= self.num_rows <= MAX_ROWS, "model.hashing.num_rows", self.num_rows, f"1 to {MAX_ROWS}")
        check(self.method in ("mix", "modulo"), "model.hashing.method", self.method, "mix, modulo")
        check(
            self.method == "mix" or self.num_hashes == 1,
            "model.hashing.num_hashes",
            self.num_hashes,
            "1 with method modulo: every further table would repeat the first",
        )


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """B histories as tensors; see the module's picture.

    `columns` holds the other columns of the history by name [N], `request` the features of the request: one value per
    history [B], or, where a loss predicts every event from what came before it, one per event [N]. `sampled` [K] are
    positions of items drawn uniformly from the catalogue, rising, each once; `sample_rate` [] is the chance that an
    item of the catalogue is among them.
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
    sampled: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    sample_rate: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(()))

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
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SequenceBatch:
        """The same batch in memory from which a GPU can copy by itself."""
        return _mapped(self, torch.Tensor.pin_memory)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch."""
        return _tensors_of(self)


@dataclasses.dataclass(frozen=True)
class RequestBatch:
    """U requests, each with its history once, and C candidates beneath them.

        histories.offsets  0 ───── 5 ──── 8         two requests
        request_of [C]     0 0 0 0 1 1 1            whose candidates these are, rising
        candidates [C]                              positions among histories.item_ids

    A history is never repeated for its candidates before it is on the device: what is computed from it is, by `expand`.
    `labels` are 0 or 1; where `known` is False the label cannot be told yet, and a loss must leave it out. `features`
    holds those of candidates [C], `histories.request` those of requests [U].
    """

    histories: SequenceBatch
    request_ms: torch.Tensor
    request_of: torch.Tensor
    candidates: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    labels: dict[str, torch.Tensor]
    known: dict[str, torch.Tensor]
    features: dict[str, torch.Tensor]

    @property
    def num_requests(self) -> int:
        """U, the number of requests."""
        return self.histories.num_rows

    @property
    def num_candidates(self) -> int:
        """C, the number of candidates."""
        return len(self.candidates)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """What belongs to requests [U, …] for each of their candidates [C, …]."""
        return values.index_select(0, self.request_of)

    def to(self, device: torch.device) -> RequestBatch:
        """The same batch on `device`."""
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> RequestBatch:
        """The same batch in memory from which a GPU can copy by itself."""
        return _mapped(self, torch.Tensor.pin_memory)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch, those of the histories first."""
        return _tensors_of(self)


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
    if hashing.method == "modulo":
        return torch.from_numpy(np.mod(item_ids, np.int64(hashing.num_rows))[:, None])
    return torch.from_numpy(row_ids(item_ids, hashing.num_hashes, hashing.num_rows, hashing.seed))


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same class whose tensors are changed ones."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: change(tensor) for name, tensor in batch.items()}
    parts = {field.name: _mapped(getattr(batch, field.name), change) for field in dataclasses.fields(batch)}
    return type(batch)(**parts)


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _tensor(array: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64, copy=True))
