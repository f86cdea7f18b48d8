"""What deduplication saves, counted: batches of requests go in, bytes and rows with and without it come out.

Without it a loader would carry every candidate's history beside the candidate, and look up every item of every one.
"""

from __future__ import annotations

import dataclasses

from tackboard.batch import RequestBatch


@dataclasses.dataclass
class DeduplicationCounters:
    """Sums over batches of requests. What ends in `_flat` is what a row per candidate would need."""

    num_requests: int = 0
    num_candidates: int = 0
    num_users: int = 0
    """Distinct users of each batch, added up."""
    history_bytes: int = 0
    """Copied to the device for histories and their items: grows with requests."""
    candidate_bytes: int = 0
    """Copied for candidates: an id's place, a position, a weight, labels and features each."""
    rows: int = 0
    """Rows of tables looked up: one per distinct item and hash function."""
    history_bytes_flat: int = 0
    rows_flat: int = 0

    def add(self, batch: RequestBatch) -> None:
        """Counts a batch."""
        histories = batch.histories
        self.num_requests += batch.num_requests
        self.num_candidates += batch.num_candidates
        self.num_users += len(histories.users.unique())
        history_bytes = sum(tensor.nbytes for tensor in histories.tensors())
        self.history_bytes += history_bytes
        self.candidate_bytes += sum(tensor.nbytes for tensor in batch.tensors()) - history_bytes
        num_hashes = histories.item_rows.shape[1]
        self.rows += histories.item_rows.numel()
        # Of each history, as often as it has candidates: its events' columns and its items' rows.
        events_flat = int(batch.expand(histories.lengths()).sum())
        per_event = [histories.items, histories.is_positive, *histories.columns.values()]
        bytes_per_event = (
            sum(tensor.element_size() for tensor in per_event) + num_hashes * histories.item_rows.element_size()
        )
        self.history_bytes_flat += events_flat * bytes_per_event
        self.rows_flat += (events_flat + batch.num_candidates) * num_hashes
