"""The user-sequence store takes events as they happen; in microseconds it returns columns of one user's history."""

from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.opening import create_store, open_store

__all__ = ["StoreConfig", "create_store", "open_store"]
