"""Counts what deduplication saves: the bytes and table rows of batches of requests, with and without it.

Without deduplication, a loader would copy the history for every candidate, and look up every item of every copy.
"""

from __future__ import annotations

import dataclasses

from tackboard.batch import RequestBatch


@dataclasses.dataclass
class DeduplicationCounters:
    """Sums over batches of requests. Fields with the suffix `_flat` hold the counts without deduplication."""

    num_requests: int = 0
    num_candidates: int = 0
    num_users: int = 0
    """Number of distinct users of each batch, summed over batches."""
    history_bytes: int = 0
    """Bytes copied to the device for histories, and for the distinct items of histories and candidates."""
    candidate_bytes: int = 0
    """Bytes of all other tensors: times of requests; items, positions, weights, labels and features of candidates."""
    rows: int = 0
    """Number of table rows looked up: one for each distinct item and hash function."""
    history_bytes_flat: int = 0
    rows_flat: int = 0

    def add(self, batch: RequestBatch) -> None:
        """Adds the counts of one batch."""
        histories = batch.histories
        self.num_requests += batch.num_requests
        self.num_candidates += batch.num_candidates
        self.num_users += len(histories.users.unique())
        history_bytes = sum(tensor.nbytes for tensor in histories.tensors())
        self.history_bytes += history_bytes
        self.candidate_bytes += sum(tensor.nbytes for tensor in batch.tensors()) - history_bytes
        num_hashes = histories.item_rows.shape[1]
        self.rows += histories.item_rows.numel()
        # Each history counts once per candidate, with the columns of its events and the table rows of its items.
        events_flat = int(batch.expand(histories.lengths()).sum())
        per_event = [histories.items, histories.is_positive, *histories.columns.values()]
        bytes_per_event = (
            sum(tensor.element_size() for tensor in per_event) + num_hashes * histories.item_rows.element_size()
        )
        self.history_bytes_flat += events_flat * bytes_per_event
        self.rows_flat += (events_flat + batch.num_candidates) * num_hashes
