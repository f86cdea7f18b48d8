"""The user-sequence store takes events as they happen, and returns the requested columns of a user's history."""

from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.opening import create_store, open_store

__all__ = ["StoreConfig", "create_store", "open_store"]
