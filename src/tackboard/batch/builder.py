"""From columns of the unified representation to batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch.batches import RequestBatch, SequenceBatch
from tackboard.batch.rows import HashConfig, item_rows
from tackboard.core.errors import DataError
from tackboard.features.column import Column


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


def make_request(
    *, history: Column, request: Mapping[str, Column], candidates: NDArray[np.int64], hashing: HashConfig
) -> RequestBatch:
    """The batch of one request: its history, its features and C candidates, without labels."""
    alone = make_batch(history=history, request=request, hashing=hashing)
    distinct, places = np.unique(np.concatenate([alone.item_ids.numpy(), candidates]), return_inverse=True)
    num_known = len(alone.item_ids)
    histories = dataclasses.replace(
        alone,
        items=torch.from_numpy(places[:num_known]).take(alone.items),
        item_ids=_tensor(distinct),
        item_rows=item_rows(distinct, hashing),
        item_log_q=torch.zeros(len(distinct)),
    )
    num_candidates = len(candidates)
    return RequestBatch(
        histories=histories,
        request_ms=torch.zeros(1, dtype=torch.int64),
        request_of=torch.zeros(num_candidates, dtype=torch.int64),
        candidates=_tensor(places[num_known:]),
        positions=torch.full((num_candidates,), -1),
        weights=torch.ones(num_candidates),
        labels={},
        known={},
        features={},
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


def _tensor(array: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64, copy=True))
