"""A window of buckets, ready to be cut into batches: its segments lie in the order in which the epoch reads them.

In: the sequences of some buckets and the order of their segments. Out: the batch of any run of segments.
Everything that costs more than a copy is done once per window: the columns of the history are computed, distinct items
found and hashed to rows. A batch is then a slice of each column, and its distinct items are found without sorting its
events:

    codes     4 0 4 2 0 2 2     positions among the window's distinct items, of the batch's events
    scratch   [·] for each of the window's distinct items, whatever was there before
              write each event's position: the last one stands       →  the events that find themselves are distinct
              write each distinct item's place among the sorted ones →  read at the codes: the batch's `items`
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, feature_tensor, item_rows
from tackboard.data.index import ItemFrequencies
from tackboard.data.plan import Segments
from tackboard.data.sequences import Sequences
from tackboard.features.column import offsets_of, ranges


class DistinctItems:
    """The M distinct items of a window with their rows and shares, and the distinct ones of any part of its events."""

    def __init__(
        self, item_ids: NDArray[np.int64], hashing: HashConfig, frequencies: ItemFrequencies | None = None
    ) -> None:
        """`item_ids` [N] are the items of the window's events."""
        encoded = pa.array(item_ids).dictionary_encode()
        found = encoded.dictionary.to_numpy()
        order = np.argsort(found)
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        self.ids = found[order]
        self.codes: NDArray[np.int32] = place[encoded.indices.to_numpy()]
        """The position of each event's item among `ids` [N]."""
        self._rows = item_rows(self.ids, hashing)
        shares = np.zeros(len(self.ids), dtype=np.float32) if frequencies is None else frequencies.log_share(self.ids)
        self._log_q = torch.from_numpy(shares)
        self._scratch = np.empty(len(self.ids), dtype=np.int32)

    def of(self, codes: NDArray[np.int32]) -> dict[str, torch.Tensor]:
        """`items`, `item_ids`, `item_rows` and `item_log_q` of a batch whose events have these codes."""
        scratch, positions = self._scratch, np.arange(len(codes), dtype=np.int32)
        scratch[codes] = positions
        distinct = codes[scratch[codes] == positions]
        distinct.sort()
        scratch[distinct] = np.arange(len(distinct), dtype=np.int32)
        chosen = torch.from_numpy(distinct)
        return {
            "items": torch.from_numpy(scratch[codes].astype(np.int64)),
            "item_ids": torch.from_numpy(self.ids[distinct]),
            "item_rows": self._rows.index_select(0, chosen),
            "item_log_q": self._log_q.index_select(0, chosen),
        }


class Window:
    """G segments in the order in which they are read."""

    def __init__(
        self, sequences: Sequences, segments: Segments, hashing: HashConfig, frequencies: ItemFrequencies
    ) -> None:
        history = sequences.histories(segments.starts, segments.lengths)
        fields = dict(history.fields or {})
        events = ranges(segments.starts, segments.lengths)
        self.lengths = segments.lengths
        self.offsets = offsets_of(segments.lengths)
        self._items = DistinctItems(fields.pop("item").values, hashing, frequencies)
        self._users = torch.from_numpy(sequences.user_ids[segments.users])
        self._is_positive = torch.from_numpy(sequences.is_positive[events])
        self._columns = {name: feature_tensor(field) for name, field in fields.items()}
        self._request = {name: feature_tensor(column.take(events)) for name, column in sequences.request.items()}

    def between(self, first: float, last: float) -> range:
        """The segments that begin at a token from `first` on and before `last`."""
        begin, end = np.searchsorted(self.offsets[:-1], [first, last])
        return range(int(begin), int(end))

    def batch(self, segments: range, chosen: NDArray[np.int64] | None = None) -> SequenceBatch:
        """The batch of a run of segments, or of those at the positions `chosen` in it."""
        if chosen is not None and len(chosen) < len(segments):
            return self._gathered(segments.start + chosen)
        first, last = int(self.offsets[segments.start]), int(self.offsets[segments.stop])

        # Copies: a view, sent to another process, would take the whole window with it.
        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[first:last].clone()

        return SequenceBatch(
            offsets=torch.from_numpy(self.offsets[segments.start : segments.stop + 1] - first),
            users=self._users[segments.start : segments.stop].clone(),
            columns={name: part(tensor) for name, tensor in self._columns.items()},
            request={name: part(tensor) for name, tensor in self._request.items()},
            is_positive=part(self._is_positive),
            **self._items.of(self._items.codes[first:last]),
        )

    def _gathered(self, segments: NDArray[np.int64]) -> SequenceBatch:
        events = ranges(self.offsets[:-1][segments], self.lengths[segments])
        chosen = torch.from_numpy(events)
        return SequenceBatch(
            offsets=torch.from_numpy(offsets_of(self.lengths[segments])),
            users=self._users[segments],
            columns={name: tensor.index_select(0, chosen) for name, tensor in self._columns.items()},
            request={name: tensor.index_select(0, chosen) for name, tensor in self._request.items()},
            is_positive=self._is_positive.index_select(0, chosen),
            **self._items.of(self._items.codes[events]),
        )
