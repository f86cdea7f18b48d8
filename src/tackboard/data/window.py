"""A window of buckets, ready to be cut into batches: its segments lie in the order in which the epoch reads them.

In: the sequences of some buckets, and their segments in order. Out: the batch of each of the window's steps.
Everything that costs more than a copy is done once per window: the columns of the history are computed, distinct items
found and hashed to rows. A batch is then a slice of each column, and its distinct items are found without sorting its
events:

    codes     4 0 4 2 0 2 2     positions among the window's distinct items, of the batch's events
    scratch   [·] for each of the window's distinct items, whatever was there before
              write each event's position: the last one stands       →  the events that find themselves are distinct
              write each distinct item's place among the sorted ones →  read at the codes: the batch's `items`
"""

from __future__ import annotations

import copy

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, item_rows
from tackboard.batch.builder import feature_tensor
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
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        self.ids = found[order]
        # 64 bits throughout: NumPy would turn shorter indices into them at every use.
        self.codes: NDArray[np.int64] = place.take(encoded.indices.to_numpy())
        """The position of each event's item among `ids` [N]."""
        self._rows = item_rows(self.ids, hashing).numpy()
        shares = np.zeros(len(self.ids), dtype=np.float32) if frequencies is None else frequencies.log_share(self.ids)
        self._log_q = shares
        self._scratch = np.empty(len(self.ids), dtype=np.int64)

    def with_own_scratch(self) -> DistinctItems:
        """The same items, for use beside the others by another thread."""
        twin = copy.copy(self)
        twin._scratch = np.empty_like(self._scratch)
        return twin

    def of(self, codes: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """`items`, `item_ids`, `item_rows` and `item_log_q` of a batch whose events have these codes."""
        # `take` and `compress` do what indexing does, several times faster for arrays of this size.
        scratch, positions = self._scratch, np.arange(len(codes))
        scratch[codes] = positions
        found = codes.compress(scratch.take(codes) == positions).astype(np.int32)
        found.sort()  # 32 bits sort in half the time.
        distinct = found.astype(np.int64)
        scratch[distinct] = positions[: len(distinct)]
        return {
            "items": torch.from_numpy(scratch.take(codes)),
            "item_ids": torch.from_numpy(self.ids.take(distinct)),
            "item_rows": torch.from_numpy(self._rows.take(distinct, axis=0)),
            "item_log_q": torch.from_numpy(self._log_q.take(distinct)),
        }


class Segmented:
    """Segments of some sequences, end to end: everything about their events that does not depend on their order."""

    def __init__(
        self, sequences: Sequences, segments: Segments, hashing: HashConfig, frequencies: ItemFrequencies
    ) -> None:
        events = ranges(segments.starts, segments.lengths)
        self.offsets = offsets_of(segments.lengths)
        fields = dict(sequences.histories_of(events, self.offsets).fields or {})
        self.items = DistinctItems(fields.pop("item").values, hashing, frequencies)
        self.codes = self.items.codes
        self.users = torch.from_numpy(sequences.user_ids[segments.users])
        self.is_positive = torch.from_numpy(sequences.is_positive.take(events))
        self.columns = {name: feature_tensor(field) for name, field in fields.items()}
        self.request = {name: feature_tensor(column.take(events)) for name, column in sequences.request.items()}

    def in_order(self, order: NDArray[np.int64]) -> Segmented:
        """The same segments, or some of them, in another order. Much cheaper than to compute them again."""
        lengths = np.diff(self.offsets)[order]
        events = ranges(self.offsets[:-1][order], lengths)
        places = torch.from_numpy(events)
        ordered = copy.copy(self)
        ordered.offsets = offsets_of(lengths)
        ordered.codes = self.codes.take(events)
        ordered.items = self.items.with_own_scratch()
        ordered.users = self.users[torch.from_numpy(order)]
        ordered.is_positive = self.is_positive[places]
        ordered.columns = {name: tensor[places] for name, tensor in self.columns.items()}
        ordered.request = {name: tensor[places] for name, tensor in self.request.items()}
        return ordered


class Window:
    """Segments in the order in which they are read; step p of the window is those from bounds[p] to bounds[p + 1]."""

    def __init__(self, segments: Segmented, bounds: NDArray[np.int64]) -> None:
        self._segments = segments
        self._bounds = bounds

    def batch(self, place: int) -> SequenceBatch:
        """The batch of the window's step number `place`."""
        begin, end = int(self._bounds[place]), int(self._bounds[place + 1])
        held = self._segments
        first, last = int(held.offsets[begin]), int(held.offsets[end])

        # Copies: a view would keep the whole window in memory for as long as the batch is used.
        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[first:last].clone()

        return SequenceBatch(
            offsets=torch.from_numpy(held.offsets[begin : end + 1] - first),
            users=held.users[begin:end].clone(),
            columns={name: part(tensor) for name, tensor in held.columns.items()},
            request={name: part(tensor) for name, tensor in held.request.items()},
            is_positive=part(held.is_positive),
            **held.items.of(held.codes[first:last]),
        )
