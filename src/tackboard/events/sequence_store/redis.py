"""This engine keeps sequences on a Redis server, which several hosts can use. `merging` explains chunks and buffers.

    PREFIX:meta                     format version, settings
    PREFIX:words:action | surface   names and their codes
    PREFIX:registry                 the users with events
    PREFIX:gone                     salted digest of a user → when the user was forgotten
    PREFIX:notes                    progress of work that is done in steps
    PREFIX:{user}:head              list of chunks; number of buffered events
    PREFIX:{user}:recent            the buffer: time and event → time received, arrival number
    PREFIX:{user}:columns           column:chunk → bytes

Every value has a seal, which is a checksum (see `sealing`). Only two numbers have no seal: the format version, which
must be a known version, and the count of buffered events, which must equal the number of entries in `recent`. In format
version 1, `words` was named `names`, `registry` was a set named `users`, and `gone` was named `forgotten`.

A script on the server appends events that are newer than all chunks, and seals them. Redis runs a script atomically.
This client computes every other change and writes it with MULTI. If another client wrote first (WATCH), this client
computes the change again. A reader fetches the list of chunks a second time together with the columns, and starts over
if the list has changed.

Decided: a call for many users is all or nothing for each user, not for all users together. The server's settings decide
how safe acknowledged events are: with `appendfsync always` they are on disk; with `everysec` the events of the last
second may be lost. After `forget`, the server's append-only file and dump may hold the deleted events until the
operator rewrites both (BGREWRITEAOF, BGSAVE).
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tackboard.core.errors import CorruptFileError, TackboardError, UsageError
from tackboard.core.files import reach
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.engine import Appended, ColumnRequest, Fetched, MovedError, Update
from tackboard.events.sequence_store.interface import USERS_PER_CALL, SequenceStore, in_steps, visible
from tackboard.events.sequence_store.merging import Change, State, append_change
from tackboard.events.sequence_store.redis_address import PARTS, Keys, RedisAddress
from tackboard.events.sequence_store.sealing import (
    FORGOTTEN_PLACE,
    Seals,
    check_version,
    event_key,
    head_place,
    open_settings,
    recent_place,
    seal_settings,
    split_event_key,
)
from tackboard.events.sequence_store.values import Columns, Integers, take

REGISTRY_PLACE = "the list of users"
MIGRATING = "migrating"
"""A field that `meta` has only while the store is being migrated."""
DAMAGED = -2
"""The append script's answer if it finds a damaged value."""
EXACT = 1 << 53
"""Scripts on the server use doubles, in which whole numbers are exact up to this limit. Events with larger times are
appended by the client instead."""
_APPEND = """
local function digest(data)
    local hex = string.sub(redis.sha1hex(ARGV[1] .. data), 1, 16)
    return (string.gsub(hex, '..', function(pair) return string.char(tonumber(pair, 16)) end))
end
local function opened(place, value)
    local content = string.sub(value, 1, -9)
    return digest(place .. content) == string.sub(value, -8) and content
end
local head, recent, registry, gone, columns = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local head_place, recent_place, gone_place = ARGV[2], ARGV[3], ARGV[4]
local first = 11
local num_events = (#ARGV - first + 1) / 3
local state = redis.call('HMGET', head, 'directory', 'recent')
local num_recent = redis.call('HLEN', recent)
if num_recent ~= tonumber(state[2] or 0) then return {-2, recent_place} end
local last, late, chunked, num_chunks = -1, 0, 0, 0
if state[1] then
    local content = opened(head_place, state[1])
    if not content then return {-2, head_place} end
    late = struct.unpack('<i8', content, 9)
    for chunk = 33, #content, 40 do
        chunked = chunked + struct.unpack('<i8', content, chunk + 8)
        last = struct.unpack('<i8', content, chunk + 24)
        num_chunks = num_chunks + 1
    end
end
if redis.call('HLEN', columns) ~= num_chunks * tonumber(ARGV[10]) then return {-2, head_place} end
if num_recent + num_events > tonumber(ARGV[8]) then return {-1} end
if late > 0 and chunked + num_recent + num_events > tonumber(ARGV[9]) then return {-1} end
for i = first, #ARGV, 3 do
    if tonumber(ARGV[i]) <= last then return {-1} end
end
local forgotten = redis.call('HGET', gone, ARGV[7])
if forgotten then
    forgotten = opened(gone_place .. ARGV[7], forgotten)
    if not forgotten then return {-2, gone_place} end
end
local before, added, refused = tonumber(forgotten or -1), 0, 0
for i = first, #ARGV, 3 do
    local value = ARGV[i + 1] .. ':' .. string.format('%.0f', num_recent + added)
    if tonumber(ARGV[i + 1]) < before then
        refused = refused + 1
    elseif redis.call('HSETNX', recent, ARGV[i + 2], value .. digest(recent_place .. ARGV[i + 2] .. value)) == 1 then
        added = added + 1
    end
end
if added > 0 then
    redis.call('HSET', head, 'recent', num_recent + added)
    redis.call('HSET', registry, ARGV[5], ARGV[6])
end
return {added, refused}
"""
"""A script that puts events into a user's buffer, or answers that the client must append them. Its two functions make
and check seals as `sealing` does. The first argument is the salt. A place is text that says where a value belongs (see
`sealing`); arguments that are places end with a colon."""


def create_redis(url: str, config: StoreConfig) -> None:
    """Makes an empty store under the prefix of `url`. An existing store raises UsageError."""
    place = RedisAddress.of(url)
    with place.explained(), contextlib.closing(place.connect()) as client:
        sealed = seal_settings(str(place), secrets.token_bytes(32), config.to_json())
        settings = {"format_version": FORMAT_VERSION, **sealed}
        keys = Keys(place.prefix)
        with client.pipeline() as pipe:
            pipe.watch(keys.of("meta"))
            if pipe.exists(keys.of("meta")):
                raise UsageError(f"{place} holds a store already", fix="open it, or choose another ?prefix=")
            pipe.multi()
            pipe.hset(keys.of("meta"), mapping=settings)
            pipe.execute()


class RedisStore(SequenceStore):
    """A store on a Redis server. The module's docstring lists its keys."""

    engine = "redis"
    users_per_update = 1

    def __init__(self, url: str) -> None:
        self.place = RedisAddress.of(url)
        self.url = url
        self._client = self.place.connect()
        try:
            seals, config = self._open_meta()
        except BaseException:
            self.close()
            raise
        self._keys = Keys(self.place.prefix, seals.version)
        super().__init__(config, seals)
        self._numbers = {name: number for number, name in enumerate(self.config.columns)}
        self._append_script = self._client.register_script(_APPEND)

    def _open_meta(self) -> tuple[Seals, StoreConfig]:
        with self.place.explained():
            settings = self._client.hgetall(Keys(self.place.prefix).of("meta"))
        if not settings:
            raise UsageError(
                f"{self.place} holds no sequence store",
                fix=f"make one with `tackboard sequences append {self.place} FILE`",
            )
        if MIGRATING.encode() in settings:
            raise UsageError(
                f"the migration of {self.place} is not finished",
                fix=f"run `tackboard sequences migrate {self.place}` again; it continues where it stopped",
            )
        try:
            version = int(settings[b"format_version"])
            named = {key.decode(): value for key, value in settings.items()}
        except (KeyError, ValueError):
            raise CorruptFileError(f"{self.place} has lost its settings", fix="restore the server's data") from None
        check_version(str(self.place), version)
        seals, text = open_settings(str(self.place), version, named)
        return seals, StoreConfig.from_json(text)

    @staticmethod
    def exists(url: str) -> bool:
        """Returns whether there is a store at `url`."""
        place = RedisAddress.of(url)
        with place.explained(), contextlib.closing(place.connect()) as client:
            return bool(client.exists(Keys(place.prefix).of("meta")))

    def close(self) -> None:
        self._client.close()

    def durability(self) -> str:
        try:
            with self.place.explained():
                settings = {**self._client.config_get("appendonly"), **self._client.config_get("appendfsync")}
        except TackboardError:
            return "Redis; the server does not say what it syncs"
        words = {key: value.decode() if isinstance(value, bytes) else value for key, value in settings.items()}
        names = {key.decode() if isinstance(key, bytes) else key: value for key, value in words.items()}
        if names.get("appendonly") != "yes":
            return "Redis, appendonly no: all events since the last dump are lost when the server dies"
        meaning = {
            "always": "every write is synced to disk before it is acknowledged",
            "everysec": "the events of the last second may be lost when the server's machine dies",
            "no": "what the kernel has not written may be lost when the server's machine dies",
        }[names["appendfsync"]]
        return f"Redis, appendfsync={names['appendfsync']}: {meaning}"

    def user_ids(self) -> Integers:
        with self.place.explained():
            if not self.seals.has_seals:
                members = self._client.smembers(self._keys.of("registry"))
                return np.array(sorted(int(member) for member in members), dtype=np.int64)
            entries = self._client.hgetall(self._keys.of("registry"))
        for member, value in entries.items():
            self.seals.open(value, REGISTRY_PLACE, member)
        return np.array(sorted(map(int, entries)), dtype=np.int64)

    def _heads(self) -> Iterator[tuple[int, Head]]:
        for step in in_steps(self.user_ids(), USERS_PER_CALL):
            pipe = self._client.pipeline(transaction=False)
            for user in step:
                pipe.hget(self._keys.user(user, "head"), "directory").hlen(self._keys.user(user, "recent"))
            answers = pipe.execute()
            for user, directory, num_recent in zip(step, answers[::2], answers[1::2], strict=True):
                yield user, dataclasses.replace(self._head(user, directory), num_recent=num_recent)

    def _num_bytes(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _check_users(self) -> None:
        """Raises CorruptFileError if a user has keys but is not in the list of users."""
        listed = set(self.user_ids().tolist())
        for user in self._keys.users_of(self._client):
            if user not in listed and user not in self.user_ids():
                raise self.seals.damaged(f"the entry of user {user} in {REGISTRY_PLACE}", "is missing")

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return self.place.explained()

    def _get(self, table: str, keys: Sequence[Any]) -> list[bytes | None]:
        with self.place.explained():
            found: list[bytes | None] = self._client.hmget(self._keys.of(table), keys) if keys else []
        return found

    def _items(self, table: str) -> dict[bytes, bytes]:
        with self.place.explained():
            found: dict[bytes, bytes] = self._client.hgetall(self._keys.of(table))
        return found

    def _fetch(self, user_ids: Sequence[int]) -> list[Fetched]:
        pipe = self._client.pipeline()
        for user in user_ids:
            head, recent, columns = (self._keys.user(user, part) for part in PARTS)
            pipe.hmget(head, ["directory", "recent"]).hgetall(recent).hlen(columns)
        answers = pipe.execute()
        return [self._fetched(user, *answers[3 * row : 3 * row + 3]) for row, user in enumerate(user_ids)]

    def _fetched(
        self, user_id: int, state: Sequence[bytes | None], recent: Mapping[bytes, bytes], num_columns: int
    ) -> Fetched:
        directory, count = state
        head = self._head(user_id, directory)
        if num_columns != len(head.chunks) * len(self._numbers):
            raise self.seals.damaged(head_place(user_id), f"does not match the {num_columns} columns that are stored")
        try:
            num_recent = int(count or 0) if self.seals.has_seals else len(recent)
            held = [(*split_event_key(key), value) for key, value in recent.items()]
        except (ValueError, struct.error):
            raise self.seals.damaged(recent_place(user_id)) from None
        return Fetched(directory, dataclasses.replace(head, num_recent=num_recent, next_arrival=num_recent), held)

    def _head(self, user_id: int, directory: bytes | None) -> Head:
        return Head() if directory is None else self.seals.open_head(user_id, directory)

    def _fetch_columns(self, requests: Sequence[ColumnRequest]) -> list[tuple[bytes | None, list[bytes | None]]]:
        pipe = self._client.pipeline()
        for user, names, chunks in requests:
            pipe.hget(self._keys.user(user, "head"), "directory")
            pipe.hmget(self._keys.user(user, "columns"), self._blob_names(names, chunks))
        answers = pipe.execute()
        return list(zip(answers[::2], answers[1::2], strict=True))

    def _update(self, decide: Callable[[], Update], *, tables: Sequence[str] = (), users: Sequence[int] = ()) -> None:
        from redis.exceptions import WatchError

        self.seals.check_writable()
        watched = [self._keys.of(table) for table in tables]
        watched += [self._keys.user(user, part) for user in users for part in ("head", "recent")]
        with self.place.explained(), self._client.pipeline() as pipe:
            while True:
                try:
                    if watched:
                        pipe.watch(*watched)
                    update = decide()
                    pipe.multi()
                    for user, change in update.users.items():
                        self._apply(pipe, user, change)
                    for table, entries in update.entries.items():
                        for key, value in entries.items():
                            name = self._keys.of(table)
                            _ = pipe.hdel(name, key) if value is None else pipe.hset(name, key, value)
                    reach("sequences:before-commit")
                    pipe.execute()
                    reach("sequences:after-commit")
                    return
                except (WatchError, MovedError):
                    pipe.reset()

    def _append(self, users: list[tuple[int, Integers]], columns: Columns, packed: list[bytes]) -> Appended:
        times, received = columns["time_ms"].values.tolist(), columns["received_ms"].values.tolist()
        late: list[tuple[int, Integers]] = []
        num_added = num_refused = 0
        for start in range(0, len(users), USERS_PER_CALL):
            step = users[start : start + USERS_PER_CALL]
            with self.place.explained():
                pipe = self._client.pipeline(transaction=False)
                for user, places in step:
                    self._append_call(pipe, user, [(times[p], received[p], packed[p]) for p in places.tolist()])
                reach("sequences:before-commit")
                answers = pipe.execute()
                reach("sequences:after-commit")
            for (user, places), answer in zip(step, answers, strict=True):
                if answer[0] == DAMAGED:
                    raise self.seals.damaged(answer[1].decode().rstrip(":"))
                if answer[0] < 0:
                    late.append((user, places))
                else:
                    num_added += answer[0]
                    num_refused += answer[1]
        for user, places in late:
            added, refused = self._append_slowly(user, places, columns)
            num_added += added
            num_refused += refused
        return Appended(num_added, len(times) - num_added - num_refused, num_refused)

    def _append_call(self, pipe: Any, user: int, events: list[tuple[int, int, bytes]]) -> None:
        limit = self.config.recent_limit
        if len(events) > limit or max(max(event[:2]) for event in events) >= EXACT:
            limit, events = -1, []  # With this limit the script refuses, and the client appends the events.
        places = [f"{place}:" for place in (head_place(user), recent_place(user), FORGOTTEN_PLACE)]
        entry = registry_entry(self.seals, user)
        limits = [limit, self.config.max_events, len(self._numbers)]
        arguments: list[Any] = [self.seals.salt, *places, user, entry, self.digest(user), *limits]
        for time_ms, received_ms, event in events:
            arguments += (time_ms, received_ms, event_key(time_ms, event))
        head, recent, columns = (self._keys.user(user, part) for part in PARTS)
        keys = [head, recent, self._keys.of("registry"), self._keys.of("gone"), columns]
        self._append_script(keys=keys, args=arguments, client=pipe)

    def _append_slowly(self, user: int, places: Integers, columns: Columns) -> tuple[int, int]:
        """Adds events that the script left out. Returns how many were added and how many refused."""
        counts = (0, 0)

        def edit(user_id: int, state: State) -> Change | None:
            nonlocal counts
            kept, num_refused = visible(columns, places, self.forgotten_ms([user_id]).get(user_id))
            counts = (0, num_refused)
            if not len(kept):
                return None
            change, num_duplicates = append_change(state, take(columns, kept), self.config, self.codec)
            counts = (len(kept) - num_duplicates, num_refused)
            return change

        self.edit([user], edit)
        return counts

    def _scrub(self) -> None:
        """Does nothing, because deleted keys cannot be read, and only the operator can rewrite the server's files."""

    def _apply(self, pipe: Any, user_id: int, change: Change) -> None:
        head, recent, columns = (self._keys.user(user_id, part) for part in PARTS)
        if change.is_empty:
            pipe.delete(head, recent, columns)
            pipe.hdel(self._keys.of("registry"), user_id)
            return
        if change.clear_recent:
            pipe.delete(recent)
        if change.drop_chunks:
            pipe.hdel(columns, *self._blob_names(list(self._numbers), change.drop_chunks))
        if change.put:
            blobs = {
                f"{self._numbers[name]}:{chunk}": self.seals.seal_column(user_id, name, chunk, data)
                for (name, chunk), data in change.put.items()
            }
            pipe.hset(columns, mapping=blobs)
        if change.add_recent:
            sealed = [self.seals.seal_recent(user_id, row) for row in change.add_recent]
            pipe.hset(recent, mapping={event_key(time_ms, event): value for time_ms, event, value in sealed})
        directory = self.seals.seal_head(user_id, change.head)
        pipe.hset(head, mapping={"directory": directory, "recent": change.head.num_recent})
        pipe.hset(self._keys.of("registry"), user_id, registry_entry(self.seals, user_id))

    def _blob_names(self, names: Sequence[str], chunks: Sequence[int]) -> list[str]:
        return [f"{self._numbers[name]}:{chunk}" for name in names for chunk in chunks]


def registry_entry(seals: Seals, user_id: int) -> bytes:
    """Returns a user's value in the list of users. The value is a seal without content."""
    return seals.seal(b"", REGISTRY_PLACE, b"%d" % user_id)
