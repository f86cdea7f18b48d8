"""The user-sequence store: events of users in, as they happen; columns of one user's history out, in microseconds."""

from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.opening import create_store, open_store

__all__ = ["StoreConfig", "create_store", "open_store"]
