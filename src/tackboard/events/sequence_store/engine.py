"""This module defines what an engine of the sequence store does. An engine stores tables, and three parts per user.

    notes, gone, words:action, words:surface    key → value
    a user                                      head, buffered events, columns of chunks

An engine reads and writes values together with their seals (checksums), and does not know what the values mean.
The module `interface` encodes and decodes the values, and decides what to write. An engine writes an `Update` all or
nothing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tackboard.events.sequence_store.codec import Head
from tackboard.events.sequence_store.merging import Change
from tackboard.events.sequence_store.sealing import SealedEvent
from tackboard.events.sequence_store.values import Columns, Integers

ColumnRequest = tuple[int, Sequence[str], Sequence[int]]
"""The id of a user, the names of the columns to fetch, and the ids of the chunks to fetch."""


@dataclasses.dataclass(frozen=True)
class Appended:
    """The numbers of added and dropped events of one call. `Engine.durability` says how safe added events are."""

    num_events: int
    """Number of added events."""
    num_duplicates: int = 0
    """Number of events that were dropped because they equal another event in everything but received_ms."""
    num_forgotten: int = 0
    """Number of events that were dropped because they were received before their user was forgotten."""


class Fetched(NamedTuple):
    """The data of one user that an engine returns. The buffered events still have their seals."""

    stamp: bytes | None
    """A value that changes when events move to other chunks. It is always None on SQLite. On Redis it is None if no
    list of chunks is stored yet."""
    head: Head
    recent: list[SealedEvent]


@dataclasses.dataclass
class Update:
    """The changes that one transaction writes."""

    users: dict[int, Change] = dataclasses.field(default_factory=dict)
    entries: dict[str, Mapping[Any, bytes | None]] = dataclasses.field(default_factory=dict)
    """Table → key → value to write; None deletes the key."""


class MovedError(Exception):
    """Raised if another client moved a user's events between two reads. The caller must then read the user again."""


class Engine(abc.ABC):
    """A key-value store for sequences."""

    engine: ClassVar[str]
    users_per_update: ClassVar[int]
    """Largest number of users whose changes are committed together."""

    @abc.abstractmethod
    def durability(self) -> str:
        """Says in words how safe acknowledged events are."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connection to the store."""

    @abc.abstractmethod
    def user_ids(self) -> Integers:
        """Returns every user with events, in rising order."""

    @abc.abstractmethod
    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """Wraps reads. The engine's errors become Tackboard errors. On SQLite, all reads in one `with` block see
        the same state."""

    @abc.abstractmethod
    def _get(self, table: str, keys: Sequence[Any]) -> list[bytes | None]:
        """Returns the value of each key in the table `gone` (keys: digests of users) or `notes`; None if missing."""

    @abc.abstractmethod
    def _items(self, table: str) -> dict[bytes, bytes]:
        """Returns all keys and values of the table `gone`, `words:action` or `words:surface`, read at one instant."""

    @abc.abstractmethod
    def _fetch(self, user_ids: Sequence[int]) -> list[Fetched]:
        """Returns the head and the buffer of each user. Both are read at the same instant."""

    @abc.abstractmethod
    def _fetch_columns(self, requests: Sequence[ColumnRequest]) -> list[tuple[bytes | None, list[bytes | None]]]:
        """Returns, for each request, the user's stamp and the sealed bytes of the chunks, column by column."""

    @abc.abstractmethod
    def _update(self, decide: Callable[[], Update], *, tables: Sequence[str] = (), users: Sequence[int] = ()) -> None:
        """Writes what `decide` returns, all or nothing.

        `decide` is allowed to read from the store. It is called again if another client wrote to these `tables` or
        `users` meanwhile.
        """

    @abc.abstractmethod
    def _append(self, users: list[tuple[int, Integers]], columns: Columns, packed: list[bytes]) -> Appended:
        """Appends the events in `columns`. `packed` holds the same events as bytes, without their times.

        `users` holds each user and the positions of the user's events in `columns` and `packed`.
        """

    @abc.abstractmethod
    def _heads(self) -> Iterator[tuple[int, Head]]:
        """Yields every user and its head."""

    @abc.abstractmethod
    def _check_users(self) -> None:
        """Raises CorruptFileError if the list of users lacks a user with events, or if the engine's data is damaged."""

    @abc.abstractmethod
    def _num_bytes(self) -> int:
        """Returns the number of bytes that the store takes; on Redis, the memory of the whole server."""

    @abc.abstractmethod
    def _scrub(self) -> None:
        """Removes the traces of deleted events from the engine's own files, if the engine can change these files."""
