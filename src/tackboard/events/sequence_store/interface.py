"""This module defines the interface to stored user sequences, which is the same for every engine (SQLite or Redis).

A store takes events, one at a time or in bulk, and returns the events of one or many users as columns. An engine is a
key-value store. It fetches bytes, and writes each `Update` all or nothing. Everything else is the same for all
engines. This module handles checksums (seals), names of actions and surfaces, notes (such as the progress of a job) and
retries. `merging` and `selection` handle order, duplicates, the cap on events per user, and ranges of time.

Decided: after `forget` has deleted a user, the store refuses all events of this user that were received before the
deletion. So a late event or an old snapshot does not restore the user. Events received after the deletion begin a new
history. To recognise a forgotten user, the store keeps a salted digest of the user id, but not the id itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tackboard.events.sequence_store.codec import Head, RowCodec
from tackboard.events.sequence_store.config import BUILT_IN, StoreConfig
from tackboard.events.sequence_store.engine import Appended, Engine, Fetched, MovedError, Update
from tackboard.events.sequence_store.merging import (
    Change,
    Load,
    State,
    all_columns,
    recent_columns,
    replace_change,
)
from tackboard.events.sequence_store.sealing import Seals, names_place
from tackboard.events.sequence_store.selection import Query, Reading, Request, select
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
"""Columns whose values are names from a list that the whole store shares."""
UNKNOWN_CODE = 1 << 31
"""Codes of this value or more are temporary: their names are known only until the next call of `coded`."""
USERS_PER_CALL = 256
"""Number of users whose events are fetched at once."""
STEP_S = 0.02
"""Work on many users is committed after about this many seconds, so that other writers wait only briefly."""
DAY_MS = 24 * 3600 * 1000
MAX_DAYS = 36_500
Edit = Callable[[int, State], Change | None]
"""A function that takes a user and the user's state, and returns a change or None.

It is called again if another client changed the user meanwhile.
"""
Look = Callable[[int, State], None]
"""A function that reads a user's state. It is called again if another client changed the user meanwhile."""


@dataclasses.dataclass(frozen=True)
class StoredSequences:
    """Events of several users, joined end to end.

    The user `user_ids[r]` has the entries from `offsets[r]` up to, but not including, `offsets[r + 1]`, oldest first.
    """

    user_ids: Integers
    offsets: Integers
    columns: dict[str, Values]

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def num_events(self) -> int:
        """Number of events of all users together."""
        return int(self.offsets[-1])

    def rows(self) -> list[dict[str, Any]]:
        """Returns the events as plain dictionaries, for people and tests."""
        lists = {name: column.to_pylist() for name, column in self.columns.items()}
        return [{name: lists[name][row] for name in lists} for row in range(self.num_events)]


class SequenceStore(Engine):
    """A store of users' events. Several processes may use one store, but each object belongs to one thread."""

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
        """Adds events of one user. `events` is a list of dictionaries, or a map from each column's name to the column.

        The keys of a dictionary are names of the store's columns. When the call returns, every reader sees the
        events, and `durability` says how safe they are. If the call raises, or the process dies, call it again with the
        same events. Events that are already stored are dropped as duplicates.
        """
        num_events = num_rows(events) if isinstance(events, dict) else len(events)
        return self.append_many(np.full(num_events, check_user_id(user_id), dtype=np.int64), events)

    def append_many(self, user_ids: Sequence[int] | Integers, events: Sequence[Event] | Columns) -> Appended:
        """Adds events of many users in one call, all or nothing. `user_ids` [n] holds the user of each event.

        On Redis the call is all or nothing for each user, but not for all users together.
        """
        ids = check_user_ids(user_ids)
        columns = (
            check_columns(events, len(ids), self.config)
            if isinstance(events, dict)
            else columns_of(events, self.config)  # type: ignore[arg-type]
        )
        if len(ids) != num_rows(columns):
            raise UsageError(
                f"{len(ids)} user ids were given", allowed=f"allowed: one for each of the {num_rows(columns)} events"
            )
        if not len(ids):
            return Appended(0)
        self.seals.check_writable()
        columns = self.coded(columns)
        return self._append(by_user(ids), columns, self.codec.pack(columns))

    def forget(self, user_id: int) -> int:
        """Deletes all events of a user at once and returns the number of deleted events.

        When the call returns, no trace of these events is left in the store's own files (for the files of a Redis
        server, see `redis`). From then on the store refuses events of this user that were received before the call.
        """
        user, digest, at_ms = check_user_id(user_id), self.digest(user_id), now_ms()
        num_events = 0

        def decide() -> Update:
            nonlocal num_events
            (found,) = self._fetch([user])
            num_events = min(found.head.num_events, self.config.max_events)
            gone = {digest: self.seals.seal_forgotten(digest, at_ms)}
            return Update({user: Change(Head(), clear_recent=True)}, {"gone": gone})

        self._update(decide, tables=["gone"], users=[user])
        self._scrub()
        return num_events

    def retain(self, days: float, *, now: int | None = None) -> int:
        """Deletes events that happened more than `days` days before `now`, and returns the number of deleted events.

        `now` is in ms since 1970, by default the present time. The call works in small steps, so that readers and
        writers can continue.
        """
        if not 0 < days <= MAX_DAYS:
            raise UsageError(f"the retention is {days:g} days", allowed=f"allowed: more than 0, at most {MAX_DAYS:,}")
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
    ) -> StoredSequences:
        """Returns the events of one user, oldest first, with the columns in `fields` (by default all columns).

        Only events that happened at `since_ms` or later and before `until_ms` are returned. Events received at
        `received_before_ms` or later are left out, because a request at that time could not have seen them. If more
        than `last` events remain, only the newest `last` events are returned. An unknown user has no events.
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
    ) -> StoredSequences:
        """Does the same as `read` for several users, in the order of `user_ids`. A user may occur more than once."""
        ids = check_user_ids(user_ids)
        names = self.config.require(self.config.columns if fields is None else fields)
        if not names:
            raise UsageError("no fields were asked for", allowed=f"allowed: some of {', '.join(self.config.columns)}")
        query = Query(tuple(names), last, since_ms, until_ms, received_before_ms)
        parts = self._read([int(user) for user in ids], query)
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([num_rows(part) for part in parts], out=offsets[1:])
        kinds = self.config.columns
        columns = join(parts) if parts else {name: empty_column(kinds[name]) for name in names}
        return StoredSequences(ids, offsets, self.named(columns))

    def held(self, user_ids: Sequence[int]) -> list[dict[str, Values]]:
        """Returns all events of each user, with all columns. Actions and surfaces are the store's codes, not names."""
        return self._read(list(user_ids), Query(tuple(self.config.columns)))

    def named(self, columns: Columns) -> dict[str, Values]:
        """Returns `columns`, with a dictionary (code → name) added to each of the columns `action` and `surface`."""
        changed = dict(columns)
        for kind in NAMED:
            if kind in changed:
                codes = changed[kind].values
                if len(codes):
                    self._require_name(kind, int(codes.max()))
                changed[kind] = Values(codes, None, self._names[kind])
        return changed

    # ---- states of users, and data of the whole store ----

    def edit(self, user_ids: Sequence[int] | Integers, edit: Edit) -> None:
        """Applies `edit` to the users in small steps. The change of each user is all or nothing.

        Other clients can write between two steps.
        """
        waiting = [int(user) for user in user_ids]
        while waiting:
            step, started = waiting[: self.users_per_update], time.monotonic()
            seen: list[int] = []

            def decide(step: list[int] = step, started: float = started, seen: list[int] = seen) -> Update:
                seen.clear()
                update = Update()
                for user in step:
                    seen.append(user)
                    change = edit(user, self._state(user))
                    if change is not None:
                        update.users[user] = change
                    if time.monotonic() - started > STEP_S:
                        break
                return update

            self._update(decide, tables=["gone"], users=step)
            waiting = waiting[len(seen) :]
            if waiting and len(step) > 1:
                # A waiting writer asks for the lock only from time to time, so the lock must stay free for a while.
                time.sleep(min(0.005, time.monotonic() - started))

    def look(self, user_ids: Sequence[int] | Integers, look: Look) -> None:
        """Calls `look` with the state of each user, and changes nothing. Other clients can write meanwhile."""
        for user in user_ids:
            is_done = False
            while not is_done:
                with self._reading(), contextlib.suppress(MovedError):
                    look(int(user), self._state(int(user)))
                    is_done = True

    def check_engine(self) -> int:
        """Returns the number of forgotten users. Raises CorruptFileError if data or the list of users is damaged."""
        with self._reading():
            self._check_users()
            gone = self._items("gone")
            for digest, value in gone.items():
                self.seals.open_forgotten(digest, value)
        return len(gone)

    def forgotten_ms(self, user_ids: Sequence[int]) -> dict[int, int]:
        """Maps each user to the time in ms when the user was forgotten. Users who were never forgotten are left out."""
        digests = [self.digest(user) for user in user_ids]
        return {
            user: self.seals.open_forgotten(digest, value)
            for user, digest, value in zip(user_ids, digests, self._get("gone", digests), strict=True)
            if value is not None
        }

    def note(self, key: str) -> str | None:
        """Returns the text that `set_note` stored under `key`, or None."""
        (text,) = self._get("notes", [key])
        return None if text is None else self.seals.open_setting(f"note:{key}", text).decode()

    def set_note(self, key: str, text: str | None) -> None:
        """Stores a text, for example the progress of work that is done in steps, under `key`. None deletes the text."""
        value = None if text is None else self.seals.seal_setting(f"note:{key}", text.encode())
        self._update(lambda: Update(entries={"notes": {key: value}}))

    def read_names(self, kind: str) -> list[str]:
        """Returns all actions or all surfaces, in the order of their codes."""
        return self.seals.open_names(kind, self._items(f"words:{kind}"))

    def _add_names(self, kind: str, names: Sequence[str]) -> None:
        """Gives codes to new names. Names that already have a code keep this code."""

        def decide() -> Update:
            held = self.read_names(kind)
            held += [name for name in names if name not in held]
            codes = {name.encode("utf-8", "surrogatepass"): code for code, name in enumerate(held)} | {b"": len(held)}
            sealed = {name: self.seals.seal_name(kind, name, code) for name, code in codes.items()}
            return Update(entries={f"words:{kind}": sealed})

        self._update(decide, tables=[f"words:{kind}"])

    def stats(self) -> dict[str, Any]:
        """Returns counts and sizes that people can read."""
        with self._reading():
            heads = [(head.num_events, head.num_recent) for _, head in self._heads()]
            num_forgotten = len(self._items("gone"))
            num_bytes = self._num_bytes()
        return {
            "engine": self.engine,
            "format_version": self.seals.version,
            "num_users": len(heads),
            "num_events": sum(min(num_events, self.config.max_events) for num_events, _ in heads),
            "num_buffered": sum(num_recent for _, num_recent in heads),
            "num_forgotten_users": num_forgotten,
            "num_bytes": num_bytes,
            "durability": self.durability(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- shared by engines ----

    def coded(self, columns: Columns, *, is_changing: bool = True) -> dict[str, Values]:
        """Returns `columns`, a batch of events, with each action and surface replaced by its code in the store.

        New names get codes in the store. If `is_changing` is False, nothing is written, and new names get temporary
        codes. `name_of` knows the names of temporary codes until the next call of `coded`.
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
        """Returns the action or surface of a code, which may be a temporary code from the last call of `coded`."""
        if code >= UNKNOWN_CODE:
            return self._passing[kind][code - UNKNOWN_CODE]
        self._require_name(kind, code)
        return str(self._names[kind][code])

    def digest(self, user_id: int) -> bytes:
        """Returns the salted digest by which the store remembers a forgotten user."""
        return hashlib.blake2b(user_id.to_bytes(8, "little", signed=True), key=self.seals.salt, digest_size=16).digest()

    def _state(self, user_id: int) -> State:
        """Returns a user's state. Its `load` raises MovedError if a writer moved events to other chunks meanwhile."""
        (found,) = self._fetch([user_id])
        return State(found.head, self._open_recent(user_id, found), self._loader(user_id, found.stamp))

    def _loader(self, user_id: int, stamp: bytes | None) -> Load:
        def load(names: Sequence[str], chunks: Sequence[int]) -> dict[tuple[str, int], bytes]:
            ((stamp_now, blobs),) = self._fetch_columns([(user_id, names, chunks)])
            if stamp_now != stamp:
                raise MovedError
            return self._open_columns(user_id, names, chunks, blobs)

        return load

    def _open_recent(self, user_id: int, found: Fetched) -> dict[str, Values] | None:
        rows = self.seals.open_recent(user_id, found.recent, found.head.num_recent)
        self.num_bytes_read += sum(len(row[1]) for row in rows)
        return recent_columns(rows, self.codec)

    def _open_columns(
        self, user_id: int, names: Sequence[str], chunks: Sequence[int], blobs: Sequence[bytes | None]
    ) -> dict[tuple[str, int], bytes]:
        keys = [(name, chunk) for name in names for chunk in chunks]
        found = self.seals.open_columns(user_id, dict(zip(keys, blobs, strict=True)), names, chunks)
        self.num_bytes_read += sum(map(len, found.values()))
        return found

    def _read(self, user_ids: list[int], query: Query) -> list[dict[str, Values]]:
        with self._reading():
            return [part for step in in_steps(user_ids, USERS_PER_CALL) for part in self._read_step(step, query)]

    def _read_step(self, user_ids: list[int], query: Query) -> list[dict[str, Values]]:
        """Reads several users together. In each round, one call to the engine serves all unfinished users."""
        results: dict[int, dict[str, Values]] = {}
        waiting = list(range(len(user_ids)))
        while waiting:
            fetched = dict(zip(waiting, self._fetch([user_ids[place] for place in waiting]), strict=True))
            open_readings: dict[int, tuple[Reading, Request]] = {}
            for place, found in fetched.items():
                reading = select(found.head, self._open_recent(user_ids[place], found), query, self.config)
                _advance(place, reading, None, open_readings, results)
            waiting = []
            while open_readings:
                asked, open_readings = open_readings, {}
                answers = self._fetch_columns([(user_ids[place], *request) for place, (_, request) in asked.items()])
                for (place, (reading, request)), (stamp, blobs) in zip(asked.items(), answers, strict=True):
                    if stamp != fetched[place].stamp:
                        waiting.append(place)  # A writer has moved events meanwhile, so read this user again.
                        continue
                    opened = self._open_columns(user_ids[place], *request, blobs)
                    _advance(place, reading, opened, open_readings, results)
        return [results[place] for place in range(len(user_ids))]

    def _require_name(self, kind: str, code: int) -> None:
        """Reads the names again if `code` is not known yet. A code without a name raises CorruptFileError."""
        if code >= len(self._names[kind]):
            self._remember(kind, self.read_names(kind))
        if code >= len(self._names[kind]):
            raise self.seals.damaged(names_place(kind), "has lost a name")

    def _remember(self, kind: str, names: list[str]) -> None:
        self._names[kind] = object_array(names)
        self._codes[kind] = {name: code for code, name in enumerate(names)}


def _advance(
    place: int,
    reading: Reading,
    blobs: Mapping[tuple[str, int], bytes] | None,
    open_readings: dict[int, tuple[Reading, Request]],
    results: dict[int, dict[str, Values]],
) -> None:
    """Sends the requested bytes (`blobs`) to a generator, and stores the generator's next request or its result."""
    try:
        request = next(reading) if blobs is None else reading.send(blobs)
    except StopIteration as end:
        results[place] = end.value
    else:
        open_readings[place] = (reading, request)


def check_user_id(user_id: Any) -> int:
    """Returns a user id as an int, or raises DataError. Callers hash strings first, with `core.hashing.string_id`."""
    if isinstance(user_id, bool) or not isinstance(user_id, (int, np.integer)):
        raise DataError(
            f"the user id has type {type(user_id).__name__}",
            allowed="allowed: int64; string_id() turns a string into an int64",
        )
    if not INT64.min <= user_id <= INT64.max:
        raise DataError("the user id does not fit into 64 bits", allowed="allowed: int64")
    return int(user_id)


def check_user_ids(user_ids: Sequence[int] | Integers) -> Integers:
    """Returns user ids as an array, or raises DataError."""
    if isinstance(user_ids, np.ndarray):
        if user_ids.dtype != np.int64 or user_ids.ndim != 1:
            raise DataError(f"user ids are {user_ids.ndim}-D {user_ids.dtype}", allowed="allowed: a 1-D array of int64")
        return user_ids
    return np.array([check_user_id(user) for user in user_ids], dtype=np.int64)


def visible(columns: Columns, places: Integers, forgotten: int | None) -> tuple[Integers, int]:
    """Drops events that were received before the user was forgotten.

    `places` are positions in `columns`. Returns the remaining positions and the number of dropped events.
    """
    if forgotten is None:
        return places, 0
    kept = places[columns["received_ms"].values[places] >= forgotten]
    return kept, len(places) - len(kept)


def in_steps(user_ids: Sequence[int] | Integers, size: int) -> Iterator[list[int]]:
    """Yields the users in lists of at most `size` users."""
    for start in range(0, len(user_ids), size):
        yield [int(user) for user in user_ids[start : start + size]]
