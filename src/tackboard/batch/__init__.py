"""The jagged batch: where data and models meet."""

from tackboard.batch.batches import Feature, Jagged, RequestBatch, SequenceBatch
from tackboard.batch.rows import HashConfig, item_rows

__all__ = ["Feature", "HashConfig", "Jagged", "RequestBatch", "SequenceBatch", "item_rows"]
