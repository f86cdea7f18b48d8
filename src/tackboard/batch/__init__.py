"""Defines the jagged batch: the tensors that the data code builds and that models read."""

from tackboard.batch.batches import Feature, Jagged, RequestBatch, SequenceBatch
from tackboard.batch.rows import HashConfig, item_rows

__all__ = ["Feature", "HashConfig", "Jagged", "RequestBatch", "SequenceBatch", "item_rows"]
