"""One interface to user sequences, whatever engine holds them.

Events of users come in, one at a time or in bulk; columns of one or many users come out. What an engine has to bring
is small: take a change of a user and make it whole or not at all, and give back bytes. Everything that decides what a
sequence *is* (order, duplicates, cap, ranges) stands in `merging` and `selection` and is the same for all engines.

Decided: a user who was forgotten stays forgotten for what was received before: a late event or an old snapshot does
not bring it back, and events received after that moment begin a new history. The store remembers a salted digest of
the id for this, not the id.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
from tackboard.events.sequence_store.batch import (
    INT64,
    Event,
    by_user,
    check_columns,
    columns_of,
    local_names,
    now_ms,
    with_codes,
)
from tackboard.events.sequence_store.codec import RowCodec
from tackboard.events.sequence_store.config import BUILT_IN, StoreConfig
from tackboard.events.sequence_store.merging import Change, State, all_columns, replace_change
from tackboard.events.sequence_store.sealing import Seals, names_place
from tackboard.events.sequence_store.selection import Query
from tackboard.events.sequence_store.values import (
    Columns,
    Integers,
    Values,
    empty_column,
    join,
    num_rows,
    object_array,
    take,
)

NAMED = tuple(name for name, kind in BUILT_IN.items() if kind == "name")
"""Columns of names that the whole store shares."""
UNKNOWN_CODE = 1 << 31
"""Where the codes begin that a name gets for one call."""
DAY_MS = 24 * 3600 * 1000
MAX_DAYS = 36_500
Edit = Callable[[int, State], Change | None]
"""What to do with a user: its state in, a change or None out. May be called again where somebody else was faster."""
Look = Callable[[int, State], None]
"""Reads a user's state. May be called again where somebody else changed the user meanwhile."""


@dataclasses.dataclass(frozen=True)
class Appended:
    """What became of the events of one call. All of it is durable when the call returns."""

    num_events: int
    """Events taken in."""
    num_duplicates: int = 0
    """Dropped: equal to one that is held in everything but received_ms."""
    num_forgotten: int = 0
    """Dropped: received before their user was forgotten."""


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Events of some users, end to end: row r's are `offsets[r]` to `offsets[r + 1]` of every column, oldest first."""

    user_ids: Integers
    offsets: Integers
    columns: dict[str, Values]

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def num_events(self) -> int:
        """Events of all the users."""
        return int(self.offsets[-1])

    def rows(self) -> list[dict[str, Any]]:
        """The events as plain dictionaries. For people and tests."""
        lists = {name: column.to_pylist() for name, column in self.columns.items()}
        return [{name: lists[name][row] for name in lists} for row in range(self.num_events)]


class SequenceStore(abc.ABC):
    """Events of users. Safe for several processes at once; one object belongs to one thread of one process."""

    config: StoreConfig
    url: str

    def __init__(self, config: StoreConfig, seals: Seals) -> None:
        self.config = config
        self.seals = seals
        self.codec = RowCodec(config.fields)
        self.num_bytes_read = 0
        """Bytes of columns and of buffered events that this object has fetched."""
        self._codes: dict[str, dict[str, int]] = {kind: {} for kind in NAMED}
        self._passing: dict[str, list[str]] = {kind: [] for kind in NAMED}
        self._names: dict[str, NDArray[np.object_]] = {kind: object_array([]) for kind in NAMED}

    # ---- writing ----

    def append(self, user_id: int, events: Sequence[Event] | Columns) -> Appended:
        """Adds events of one user: dictionaries with the store's columns as keys, or columns.

        When it returns, the events are durable and every reader sees them. Where it raises, or the process dies
        before, calling it again with the same events is right: what was taken in already is dropped as a duplicate.
        """
        num_events = num_rows(events) if isinstance(events, dict) else len(events)
        return self.append_many(np.full(num_events, check_user_id(user_id), dtype=np.int64), events)

    def append_many(self, user_ids: Sequence[int] | Integers, events: Sequence[Event] | Columns) -> Appended:
        """Adds events of many users in one call, `user_ids` [n] being whose each is: all of them or none.

        On Redis the call is whole user by user; see its module.
        """
        ids = check_user_ids(user_ids)
        columns = (
            check_columns(events, len(ids), self.config)
            if isinstance(events, dict)
            else columns_of(events, self.config)  # type: ignore[arg-type]
        )
        if len(ids) != num_rows(columns):
            raise UsageError(f"{len(ids)} user ids", allowed=f"allowed: one for each of the {num_rows(columns)} events")
        if not len(ids):
            return Appended(0)
        return self._append(by_user(ids), columns)

    def forget(self, user_id: int) -> int:
        """Deletes everything of a user at once; returns how many events that were.

        Nothing of them is left in the store's files when it returns. Events received before now are refused from
        here on.
        """
        return self._forget(check_user_id(user_id), now_ms())

    def retain(self, days: float, *, now: int | None = None) -> int:
        """Deletes events that happened more than `days` before `now` (ms, the clock's by default); returns how many.

        User by user, so that readers and writers go on.
        """
        if not 0 < days <= MAX_DAYS:
            raise UsageError(f"retention of {days:g} days", allowed=f"allowed: more than 0, at most {MAX_DAYS:,}")
        limit = (now_ms() if now is None else now) - int(days * DAY_MS)
        dropped: dict[int, int] = {}

        def edit(user_id: int, state: State) -> Change | None:
            columns = all_columns(state, self.config)
            old = 0 if columns is None else int(np.searchsorted(columns["time_ms"].values, limit))
            dropped[user_id] = old
            return replace_change(state, take(columns, slice(old, None)), self.config) if columns and old else None

        self.edit(self.user_ids(), edit)
        self._scrub()
        return sum(dropped.values())

    # ---- reading ----

    def read(
        self,
        user_id: int,
        fields: Sequence[str] | None = None,
        *,
        last: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        received_before_ms: int | None = None,
    ) -> Sequences:
        """The events of one user, oldest first, as the named columns (all by default).

        `last` takes the newest so many; `since_ms` is included, `until_ms` is not; `received_before_ms` gives what a
        request at that time could have seen. A user who is not known has no events.
        """
        return self.read_many(
            [user_id],
            fields,
            last=last,
            since_ms=since_ms,
            until_ms=until_ms,
            received_before_ms=received_before_ms,
        )

    def read_many(
        self,
        user_ids: Sequence[int] | Integers,
        fields: Sequence[str] | None = None,
        *,
        last: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        received_before_ms: int | None = None,
    ) -> Sequences:
        """`read` for several users, in the order given; one at a time may be asked for more than once."""
        ids = check_user_ids(user_ids)
        names = self.config.require(self.config.columns if fields is None else fields)
        if not names:
            raise UsageError("no fields", allowed=f"allowed: some of {', '.join(self.config.columns)}")
        query = Query(tuple(names), last, since_ms, until_ms, received_before_ms)
        parts = self._read([int(user) for user in ids], query)
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([num_rows(part) for part in parts], out=offsets[1:])
        kinds = self.config.columns
        columns = join(parts) if parts else {name: empty_column(kinds[name]) for name in names}
        return Sequences(ids, offsets, self.named(columns))

    def held(self, user_ids: Sequence[int]) -> list[dict[str, Values]]:
        """Everything of each user, with the store's codes of actions and surfaces."""
        return self._read(list(user_ids), Query(tuple(self.config.columns)))

    def named(self, columns: Columns) -> dict[str, Values]:
        """Columns with the dictionaries of actions and surfaces."""
        changed = dict(columns)
        for kind in NAMED:
            if kind in changed:
                codes = changed[kind].values
                if len(codes):
                    self._require_name(kind, int(codes.max()))
                changed[kind] = Values(codes, None, self._names[kind])
        return changed

    # ---- what engines bring ----

    @abc.abstractmethod
    def user_ids(self) -> Integers:
        """Every user with events, in rising order."""

    @abc.abstractmethod
    def edit(self, user_ids: Sequence[int] | Integers, edit: Edit) -> None:
        """Applies `edit` to each user, whole or not at all for each, in small steps that let others in between."""

    @abc.abstractmethod
    def look(self, user_ids: Sequence[int] | Integers, look: Look) -> None:
        """Shows `look` the state of each user; changes nothing, and lets others write in between."""

    @abc.abstractmethod
    def check_engine(self) -> int:
        """Checks what belongs to no user, and that no user is lost; returns how many users are forgotten.

        Damage raises CorruptFileError.
        """

    @abc.abstractmethod
    def forgotten_ms(self, user_ids: Sequence[int]) -> dict[int, int]:
        """When each of these users was forgotten; those who never were are left out."""

    @abc.abstractmethod
    def note(self, key: str) -> str | None:
        """What `set_note` kept under `key`."""

    @abc.abstractmethod
    def set_note(self, key: str, text: str | None) -> None:
        """Keeps a text in the store, for work that is done in steps; None deletes it."""

    @abc.abstractmethod
    def durability(self) -> str:
        """What an acknowledgement means here, in words."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counts and sizes, for people."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of the store."""

    @abc.abstractmethod
    def _append(self, users: list[tuple[int, Integers]], columns: Columns) -> Appended: ...

    @abc.abstractmethod
    def _read(self, user_ids: list[int], query: Query) -> list[dict[str, Values]]: ...

    @abc.abstractmethod
    def _forget(self, user_id: int, at_ms: int) -> int: ...

    @abc.abstractmethod
    def read_names(self, kind: str) -> list[str]:
        """Names by their codes."""

    @abc.abstractmethod
    def _add_names(self, kind: str, names: Sequence[str]) -> None:
        """Gives new names codes; those that have one keep it."""

    @abc.abstractmethod
    def _scrub(self) -> None:
        """Removes the last traces of what was deleted, where the engine leaves any that it can reach."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- shared by engines ----

    def coded(self, columns: Columns, *, is_changing: bool = True) -> dict[str, Values]:
        """A batch with the store's codes of its actions and surfaces.

        New names get codes first. Without `is_changing` nothing is written: they get codes that only this call knows.
        """
        codes: dict[str, dict[str, int]] = {}
        for kind in NAMED:
            names = local_names(columns, kind)
            if any(name not in self._codes[kind] for name in names):
                if is_changing:
                    self._add_names(kind, [name for name in names if name not in self._codes[kind]])
                self._remember(kind, self.read_names(kind))
            codes[kind] = self._codes[kind]
            self._passing[kind] = [name for name in names if name not in self._codes[kind]]
            if self._passing[kind]:
                passing = {name: UNKNOWN_CODE + number for number, name in enumerate(self._passing[kind])}
                codes[kind] = {**self._codes[kind], **passing}
        return with_codes(columns, codes)

    def name_of(self, kind: str, code: int) -> str:
        """The action or surface behind a code; behind one that only the last call of `coded` knew, too."""
        if code >= UNKNOWN_CODE:
            return self._passing[kind][code - UNKNOWN_CODE]
        self._require_name(kind, code)
        return str(self._names[kind][code])

    def digest(self, user_id: int) -> bytes:
        """What is remembered of a user who was forgotten."""
        return hashlib.blake2b(user_id.to_bytes(8, "little", signed=True), key=self.seals.salt, digest_size=16).digest()

    def _require_name(self, kind: str, code: int) -> None:
        """Reads the names again where `code` is newer than those that are known; it must have one."""
        if code >= len(self._names[kind]):
            self._remember(kind, self.read_names(kind))
        if code >= len(self._names[kind]):
            raise self.seals.damaged(names_place(kind), "has lost a name")

    def _remember(self, kind: str, names: list[str]) -> None:
        self._names[kind] = object_array(names)
        self._codes[kind] = {name: code for code, name in enumerate(names)}


def check_user_id(user_id: Any) -> int:
    """A user id as an int, or DataError. Strings are hashed by whoever has them, with `core.hashing.string_id`."""
    if isinstance(user_id, bool) or not isinstance(user_id, (int, np.integer)):
        raise DataError(
            f"a user id of type {type(user_id).__name__}", allowed="allowed: int64; string_id() makes one of a string"
        )
    if not INT64.min <= user_id <= INT64.max:
        raise DataError("a user id beyond 64 bits", allowed="allowed: int64")
    return int(user_id)


def check_user_ids(user_ids: Sequence[int] | Integers) -> Integers:
    """User ids as an array, or DataError."""
    if isinstance(user_ids, np.ndarray):
        if user_ids.dtype != np.int64 or user_ids.ndim != 1:
            raise DataError(f"user ids of type {user_ids.dtype}", allowed="allowed: a flat array of int64")
        return user_ids
    return np.array([check_user_id(user) for user in user_ids], dtype=np.int64)


def visible(columns: Columns, places: Integers, forgotten: int | None) -> tuple[Integers, int]:
    """Those of a user's events that were not received before it was forgotten, and how many were."""
    if forgotten is None:
        return places, 0
    kept = places[columns["received_ms"].values[places] >= forgotten]
    return kept, len(places) - len(kept)


def in_steps(user_ids: Sequence[int] | Integers, size: int) -> Iterator[list[int]]:
    """The users, a few at a time."""
    for start in range(0, len(user_ids), size):
        yield [int(user) for user in user_ids[start : start + size]]
