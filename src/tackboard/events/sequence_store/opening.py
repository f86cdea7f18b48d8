"""Opens a store by its address: `redis://host:port/db?prefix=name`, or the path of an SQLite file."""

from __future__ import annotations

from pathlib import Path

from tackboard.core.errors import UsageError
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.redis import RedisStore, create_redis
from tackboard.events.sequence_store.sqlite import SqliteStore, create_sqlite

REDIS_SCHEMES = ("redis://", "rediss://")


def open_store(url: str | Path, *, synchronous: str = "full") -> SequenceStore:
    """Opens the store at a path or URL. A missing store raises UsageError; a file that is not a store raises DataError.

    `synchronous` (`full` or `normal`) affects only SQLite. On Redis, the server's setting `appendfsync` decides.
    """
    text = _checked(url)
    if is_redis(text):
        return RedisStore(text)
    return SqliteStore(Path(text), synchronous=synchronous)


def create_store(url: str | Path, config: StoreConfig | None = None, *, synchronous: str = "full") -> SequenceStore:
    """Makes an empty store and opens it. An existing store raises UsageError."""
    text = _checked(url)
    settings = config or StoreConfig()
    if is_redis(text):
        create_redis(text, settings)
    else:
        create_sqlite(Path(text), settings)
    return open_store(text, synchronous=synchronous)


def store_exists(url: str | Path) -> bool:
    """Returns whether there is a store at a Redis URL, or any file (even a file that is not a store) at a path."""
    text = _checked(url)
    if is_redis(text):
        return RedisStore.exists(text)
    return Path(text).exists()


def is_redis(url: str | Path) -> bool:
    """Returns whether an address is a Redis URL."""
    return str(url).startswith(REDIS_SCHEMES)


def _checked(url: str | Path) -> str:
    text = str(url)
    if "://" in text and not text.startswith(REDIS_SCHEMES):
        raise UsageError(
            f"a store cannot be at {text.partition('://')[0]}://…",
            allowed="allowed: redis://host:port/db?prefix=name, or the path of a file",
        )
    return text
