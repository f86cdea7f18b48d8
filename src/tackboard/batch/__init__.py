"""Defines the jagged batch: the tensors that the data code builds and that models read."""

from tackboard.batch.batches import Feature, Jagged, RequestBatch, SequenceBatch
from tackboard.batch.rows import HashConfig, can_grow, item_rows

__all__ = ["Feature", "HashConfig", "Jagged", "RequestBatch", "SequenceBatch", "can_grow", "item_rows"]
