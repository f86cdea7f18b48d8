"""A window of buckets, ready to be cut into batches: its segments lie in the order in which the epoch reads them.

In: the sequences of some buckets, and their segments in order. Out: the batch of each of the window's steps.
Everything that costs more than a copy is done once per window: the columns of the history are computed, distinct items
found and hashed to rows. A batch is then a slice of each column (`batch.builder.PreparedHistories`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import PreparedHistories
from tackboard.data.index import ItemFrequencies
from tackboard.data.plan import Segments
from tackboard.data.sequences import Sequences
from tackboard.features.column import offsets_of, ranges


class Segmented(PreparedHistories):
    """Segments of some sequences, end to end."""

    def __init__(
        self, sequences: Sequences, segments: Segments, hashing: HashConfig, frequencies: ItemFrequencies
    ) -> None:
        events = ranges(segments.starts, segments.lengths)
        super().__init__(
            history=sequences.histories_of(events, offsets_of(segments.lengths)),
            hashing=hashing,
            users=sequences.user_ids[segments.users],
            request={name: column.take(events) for name, column in sequences.request.items()},
            is_positive=sequences.is_positive.take(events),
            log_q=frequencies.log_share,
        )


class Window:
    """Segments in the order in which they are read; step p of the window is those from bounds[p] to bounds[p + 1]."""

    def __init__(self, segments: PreparedHistories, bounds: NDArray[np.int64]) -> None:
        self._segments = segments
        self._bounds = bounds

    def batch(self, place: int) -> SequenceBatch:
        """The batch of the window's step number `place`."""
        return self._segments.batch(int(self._bounds[place]), int(self._bounds[place + 1]))
