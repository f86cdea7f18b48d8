"""What an engine of the sequence store brings: tables of keys and values, and the three parts of a user as bytes.

    notes, gone, words:action, words:surface    key → value
    a user                                      head, buffered events, columns of chunks

Values come and go with their seals on. An engine does not know what they mean: `interface` opens and makes them, and
decides what to write. An engine writes an `Update` whole or not at all.
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
"""A user, and the columns and chunks that are wanted of it."""


@dataclasses.dataclass(frozen=True)
class Appended:
    """What happened to the events of one call. Everything is durable when the call returns."""

    num_events: int
    """Events taken in."""
    num_duplicates: int = 0
    """Dropped: equal to one that is held in everything but received_ms."""
    num_forgotten: int = 0
    """Dropped: received before their user was forgotten."""


class Fetched(NamedTuple):
    """A user as an engine holds it, with seals still on the buffered events."""

    stamp: bytes | None
    """Changes whenever events move into other chunks; None where the engine's transactions rule that out."""
    head: Head
    recent: list[SealedEvent]


@dataclasses.dataclass
class Update:
    """What one transaction writes."""

    users: dict[int, Change] = dataclasses.field(default_factory=dict)
    entries: dict[str, Mapping[Any, bytes | None]] = dataclasses.field(default_factory=dict)
    """Table, then key, then value; None deletes the key."""


class MovedError(Exception):
    """Another client moved a user's events between two looks at them: look again."""


class Engine(abc.ABC):
    """A key-value store for sequences."""

    engine: ClassVar[str]
    users_per_update: ClassVar[int]
    """Users whose changes are committed together."""

    @abc.abstractmethod
    def durability(self) -> str:
        """What an acknowledgement means here, in words."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connection to the store."""

    @abc.abstractmethod
    def user_ids(self) -> Integers:
        """Every user with events, in rising order."""

    @abc.abstractmethod
    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the engine's errors become ours, and reads see one state where the engine can do that."""

    @abc.abstractmethod
    def _get(self, table: str, keys: Sequence[Any]) -> list[bytes | None]:
        """Values of a table: `gone` (by the digest of a user) or `notes`."""

    @abc.abstractmethod
    def _items(self, table: str) -> dict[bytes, bytes]:
        """A whole table at one instant: `gone`, `words:action` or `words:surface`."""

    @abc.abstractmethod
    def _fetch(self, user_ids: Sequence[int]) -> list[Fetched]:
        """The heads and buffers of users, each at one instant."""

    @abc.abstractmethod
    def _fetch_columns(self, requests: Sequence[ColumnRequest]) -> list[tuple[bytes | None, list[bytes | None]]]:
        """For each request the user's stamp, and its blobs, column by column, as sealed bytes."""

    @abc.abstractmethod
    def _update(self, decide: Callable[[], Update], *, tables: Sequence[str] = (), users: Sequence[int] = ()) -> None:
        """Writes what `decide` returns, whole or not at all.

        `decide` may read, and is called again where another client wrote to these tables or users meanwhile.
        """

    @abc.abstractmethod
    def _append(self, users: list[tuple[int, Integers]], columns: Columns, packed: list[bytes]) -> Appended:
        """Appends the events of each user; `packed` is everything of an event but its times."""

    @abc.abstractmethod
    def _heads(self) -> Iterator[tuple[int, Head]]:
        """Every user and its head."""

    @abc.abstractmethod
    def _check_users(self) -> None:
        """Raises CorruptFileError where a user has events and no head, or the engine finds damage of its own."""

    @abc.abstractmethod
    def _num_bytes(self) -> int:
        """Bytes that the store takes."""

    @abc.abstractmethod
    def _scrub(self) -> None:
        """Removes the last traces of what was deleted, where the engine leaves any that it can reach."""
