"""Builds batches from columns of features (`features.column`), for training and for scoring.

    make_batch          one batch of histories, for evaluation; slower than `PreparedHistories`, with the same result
    PreparedHistories   many histories, prepared once; a batch only copies some of them
    make_request        one request with its candidates, as a server receives it
    make_requests       several requests whose distinct items are known already
    with_items          a batch of histories with further items, such as drawn negatives

The functions take three things: histories, as one sequence column that contains `item`; features, as columns; and ids
of candidates.
They return tensors that share no memory with these columns. Whole numbers, ids and times become int64, other numbers
become float32, a vector has the shape [rows, width], and a list is `Jagged`. Text cannot become a tensor, and no value
may be missing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch.batches import Feature, Jagged, RequestBatch, SequenceBatch
from tackboard.batch.items import DistinctItems, ItemTable, LogShares, distinct_items
from tackboard.batch.rows import HashConfig
from tackboard.core.errors import DataError
from tackboard.features.column import Column, offsets_of, ranges

Columns = Mapping[str, Column]


def make_batch(
    *,
    history: Column,
    hashing: HashConfig,
    users: NDArray[np.int64] | None = None,
    request: Columns | None = None,
    is_positive: NDArray[np.bool_] | None = None,
    log_q: LogShares | None = None,
) -> SequenceBatch:
    """Builds a batch of B histories from a sequence column that contains `item`, and from features of the request.

    `is_positive` [N] marks the events that a loss may predict (default: none). `log_q` gives the log of each distinct
    item's share of the training events, for the popularity correction of the loss (default: 0). `users` [B] holds the
    users of the histories (default: 0).
    """
    items = distinct_items(item_column(history).values, hashing, log_q)
    users = None if users is None else users.copy()
    is_positive = None if is_positive is None else is_positive.copy()
    return _histories(history, items, users=users, request=request, is_positive=is_positive)


class PreparedHistories:
    """Holds histories, and everything computed from them that does not depend on how they are cut into batches.

    A history is a range of consecutive events in flat columns. The columns stay in the order of the dataset, and a
    batch gathers its own events. Sorting all events into the order of the batches first would copy every event twice.
    """

    def __init__(
        self,
        *,
        events: Column,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        users: NDArray[np.int64],
        request: Columns,
        is_positive: NDArray[np.bool_],
        items: DistinctItems,
        codes: NDArray[np.int64],
    ) -> None:
        """History b has lengths[b] events from index starts[b] on, and belongs to the user users[b].

        `events` is a sequence column. The elements of its columns are read end to end, and the bounds of its rows are
        ignored. `request`, `is_positive` and `codes` have one element per event. `codes` holds the position of each
        event's item in `items`.
        """
        self.lengths = lengths
        self._starts, self.users = starts, users
        self._items, self._codes = items, codes
        self._is_positive = is_positive
        self._columns = {name: _array(field) for name, field in (events.fields or {}).items() if name != "item"}
        self._request = request

    def in_order(self, order: NDArray[np.int64]) -> PreparedHistories:
        """Returns the same histories, or some of them, in another order, without preparing them again."""
        ordered = copy.copy(self)
        ordered.lengths, ordered._starts, ordered.users = self.lengths[order], self._starts[order], self.users[order]
        ordered._items = self._items.with_own_scratch()
        return ordered

    def batch(self, begin: int, end: int) -> SequenceBatch:
        """Returns the batch of histories `begin` to `end` - 1, the same batch that `make_batch` would build."""
        lengths = self.lengths[begin:end]
        events = ranges(self._starts[begin:end], lengths)
        return SequenceBatch(
            offsets=torch.from_numpy(offsets_of(lengths)),
            users=torch.from_numpy(self.users[begin:end].copy()),
            columns={name: torch.from_numpy(values.take(events, axis=0)) for name, values in self._columns.items()},
            request=features_of({name: column.take(events) for name, column in self._request.items()}),
            is_positive=torch.from_numpy(self._is_positive.take(events)),
            **self._items.of(self._codes.take(events)),
        )


def make_request(
    *,
    history: Column,
    candidates: NDArray[np.int64],
    hashing: HashConfig,
    request: Columns | None = None,
    features: Columns | None = None,
) -> RequestBatch:
    """Builds the batch of one request: its history, its features, and C candidates with features. It has no labels."""
    items = distinct_items(np.concatenate([item_column(history).values, candidates]), hashing)
    request_of = np.zeros(len(candidates), dtype=np.int64)
    return make_requests(history=history, items=items, request_of=request_of, request=request, features=features)


def make_requests(
    *,
    history: Column,
    items: Mapping[str, torch.Tensor],
    request_of: NDArray[np.int64],
    users: NDArray[np.int64] | None = None,
    request_ms: NDArray[np.int64] | None = None,
    request: Columns | None = None,
    is_positive: NDArray[np.bool_] | None = None,
    features: Columns | None = None,
    positions: NDArray[np.int64] | None = None,
    weights: NDArray[np.float32] | None = None,
    labels: Mapping[str, NDArray[np.int8]] | None = None,
) -> RequestBatch:
    """Builds the batch of U requests, one per row of `history`. Candidate c belongs to request `request_of[c]` [C].

    `items` comes from `distinct_items` or `DistinctItems.of`; it describes the items of all events, followed by the
    items of all candidates. A label is 1, 0, or -1 if it is not known. Arguments that only training has may be left
    out; `RequestBatch` lists their defaults. Columns are copied. Other arrays are used without a copy, because the
    caller made them for this batch only.
    """
    num_events, num_requests, num_candidates = len(item_column(history).values), len(history), len(request_of)
    places = items["items"]
    of_events = {**items, "items": places[:num_events].clone()}
    return RequestBatch(
        histories=_histories(history, of_events, users=users, request=request, is_positive=is_positive),
        request_ms=_owned(np.zeros(num_requests) if request_ms is None else request_ms, np.int64),
        request_of=_owned(request_of, np.int64),
        candidates=places[num_events:].clone(),
        positions=_owned(np.full(num_candidates, -1) if positions is None else positions, np.int64),
        weights=_owned(np.ones(num_candidates) if weights is None else weights, np.float32),
        labels={name: _owned(label == 1, np.float32) for name, label in (labels or {}).items()},
        known={name: _owned(label >= 0, np.bool_) for name, label in (labels or {}).items()},
        features=features_of(features),
    )


def with_items(batch: SequenceBatch, table: ItemTable) -> SequenceBatch:
    """Returns the batch with all items of `table` as its distinct items. `table` must hold every item of the batch."""
    places = torch.from_numpy(table.ids.searchsorted(batch.item_ids.numpy()))
    parts = {**vars(batch), "items": places.take(batch.items), **table.tensors()}
    return SequenceBatch(**parts)


def item_column(history: Column) -> Column:
    """Returns the column that holds the item of each event."""
    assert history.fields is not None
    return history.fields["item"]


def features_of(columns: Columns | None) -> dict[str, Feature]:
    """Converts columns to the features of a batch."""
    return {name: _feature(column) for name, column in (columns or {}).items()}


def feature_tensor(column: Column) -> torch.Tensor:
    """Copies a column into a tensor: int64 for whole numbers, ids and times, float32 for other numbers, or bool.

    The elements of a list column are returned end to end. Raises DataError if a value is missing, or if the column
    holds text or sequences.
    """
    return torch.from_numpy(_array(column).copy())


def _array(column: Column) -> NDArray[np.generic]:
    """Returns the array from which `feature_tensor` makes a tensor. Copies values only to change their type."""
    if column.present is not None and not column.present.all():
        raise DataError(f"a value of a feature of type {column.type} is missing", fix="define it with .fill_missing(…)")
    if column.dictionary is not None or column.fields is not None:
        raise DataError(f"a feature of type {column.type} cannot become a tensor", fix="use .hash_id() or .index_in(…)")
    return column.values.astype(np.float32, copy=False) if column.values.dtype.kind == "f" else column.values


def _feature(column: Column) -> Feature:
    values = feature_tensor(column)
    return values if column.offsets is None else Jagged(values, _copied(column.offsets, np.int64))


def _histories(
    history: Column,
    items: Mapping[str, torch.Tensor],
    *,
    users: NDArray[np.int64] | None,
    request: Columns | None,
    is_positive: NDArray[np.bool_] | None,
) -> SequenceBatch:
    positive = np.zeros(len(item_column(history).values)) if is_positive is None else is_positive
    return SequenceBatch(
        offsets=_copied(_offsets(history), np.int64),
        users=_owned(np.zeros(len(history)) if users is None else users, np.int64),
        columns=_columns(history),
        request=features_of(request),
        is_positive=_owned(positive, np.bool_),
        **items,
    )


def _offsets(history: Column) -> NDArray[np.int64]:
    offsets = item_column(history).offsets
    return np.zeros(1, dtype=np.int64) if offsets is None else offsets


def _columns(history: Column) -> dict[str, torch.Tensor]:
    """Returns the columns of the history other than the item, with elements end to end."""
    return {name: feature_tensor(field) for name, field in (history.fields or {}).items() if name != "item"}


def _copied(array: NDArray[np.generic], dtype: np.typing.DTypeLike) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=dtype, copy=True))


def _owned(array: NDArray[np.generic], dtype: np.typing.DTypeLike) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=dtype))
