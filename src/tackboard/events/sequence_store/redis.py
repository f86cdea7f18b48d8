"""The engine for several hosts: a Redis server, the same sequences as in SQLite.

    PREFIX:meta                     format version, settings
    PREFIX:words:action | surface   names and their numbers
    PREFIX:registry                 the users with events
    PREFIX:gone                     salted digest of a user → when it was forgotten
    PREFIX:notes                    texts of work that is done in steps
    PREFIX:{user}:head              directory of chunks; how many events are buffered
    PREFIX:{user}:recent            time and event → received, arrival: the buffer
    PREFIX:{user}:columns           column:chunk → bytes

Every value bears a seal (see `sealing`), also those that the server's scripts write. Two numbers have none and are
compared with something else instead: the format version with those that are known, and the count of buffered events
with the events. Of version 1, `words` is `names`, `registry` the set `users`, and `gone` is `forgotten`.

An append of events that are newer than all chunks is one script, which the server runs whole; everything else is done
here and written by MULTI, and done again where another client came first (WATCH). A reader looks at the directory
again when it fetches bytes, and starts over if it changed meanwhile.

Decided: a call for many users is whole for each user, not for all of them together. What an acknowledgement is worth
is the server's setting: with `appendfsync always` it is on disk, with `everysec` a second may be lost. The server's own
files (append-only file, dumps) are its operator's to rewrite after `forget`: BGREWRITEAOF.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tackboard.core.errors import CorruptFileError, TackboardError, UsageError
from tackboard.core.files import reach
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import Appended, Edit, Look, SequenceStore, in_steps, visible
from tackboard.events.sequence_store.merging import Change, RecentRow, State, append_change, recent_columns
from tackboard.events.sequence_store.redis_place import PARTS, SCAN_COUNT, Keys, Place
from tackboard.events.sequence_store.sealing import (
    FORGOTTEN_PLACE,
    Seals,
    check_version,
    event_key,
    head_place,
    names_place,
    open_settings,
    recent_place,
    seal_settings,
    split_event_key,
)
from tackboard.events.sequence_store.selection import Query, Reading, Request, select
from tackboard.events.sequence_store.values import Columns, Integers, Values, take

USERS_PER_CALL = 256
REGISTRY_PLACE = "the list of users"
MIGRATING = "migrating"
"""Field of `meta` while a store is migrated."""
DAMAGED = -2
"""What the script for appending answers where it meets a damaged block."""
EXACT = 1 << 53
"""The server's scripts count in doubles: what is not below this goes the slow way."""
_SEALING = """
local function digest(data)
    local hex = string.sub(redis.sha1hex(ARGV[1] .. data), 1, 16)
    return (string.gsub(hex, '..', function(pair) return string.char(tonumber(pair, 16)) end))
end
local function opened(place, value)
    local content = string.sub(value, 1, -9)
    return digest(place .. content) == string.sub(value, -8) and content
end
"""
"""`sealing` for the server. The first argument is the salt; a place ends with its colon and the key."""
_APPEND = (
    _SEALING
    + """
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
)
_NAME = (
    _SEALING
    + """
local held, count = redis.call('HGET', KEYS[1], ''), 0
if held then count = tonumber(opened(ARGV[2], held) or -1) end
if redis.call('HLEN', KEYS[1]) ~= (held and count + 1 or 0) then return -1 end
for i = 3, #ARGV do
    if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
        redis.call('HSET', KEYS[1], ARGV[i], count .. digest(ARGV[2] .. ARGV[i] .. count))
        count = count + 1
    end
end
redis.call('HSET', KEYS[1], '', count .. digest(ARGV[2] .. count))
return count
"""
)


def create_redis(url: str, config: StoreConfig) -> None:
    """Makes an empty store under the prefix of `url`; one that exists raises UsageError."""
    place = Place.of(url)
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
    """A store on a Redis server; see the module's table."""

    def __init__(self, url: str) -> None:
        self.place = Place.of(url)
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
        self._name_script = self._client.register_script(_NAME)

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
                fix=f"run `tackboard sequences migrate {self.place}` again; it goes on where it was",
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
        """Whether there is a store at `url`."""
        place = Place.of(url)
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
            return "Redis, appendonly no: in memory, lost when the server dies"
        meaning = {
            "always": "synced to disk before it is acknowledged",
            "everysec": "up to a second may be lost when the server's machine dies",
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

    def stats(self) -> dict[str, Any]:
        users = self.user_ids()
        num_events = num_recent = 0
        with self.place.explained():
            for step in in_steps(users, USERS_PER_CALL):
                pipe = self._client.pipeline(transaction=False)
                for user in step:
                    pipe.hget(self._keys.user(user, "head"), "directory").hlen(self._keys.user(user, "recent"))
                answers = pipe.execute()
                for user, directory, recent in zip(step, answers[::2], answers[1::2], strict=True):
                    chunked = 0 if directory is None else self.seals.open_head(user, directory).num_chunked
                    num_recent += recent
                    num_events += min(self.config.max_events, chunked + recent)
            num_forgotten = self._client.hlen(self._keys.of("gone"))
            num_bytes = int(self._client.info("memory")["used_memory"])
        return {
            "engine": "redis",
            "format_version": self.seals.version,
            "num_users": len(users),
            "num_events": num_events,
            "num_buffered": num_recent,
            "num_forgotten_users": int(num_forgotten),
            "num_bytes": num_bytes,
            "durability": self.durability(),
        }

    def note(self, key: str) -> str | None:
        with self.place.explained():
            text = self._client.hget(self._keys.of("notes"), key)
        return None if text is None else self.seals.open_setting(f"note:{key}", text).decode()

    def set_note(self, key: str, text: str | None) -> None:
        self.seals.check_writable()
        with self.place.explained():
            if text is None:
                self._client.hdel(self._keys.of("notes"), key)
            else:
                value = self.seals.seal_setting(f"note:{key}", text.encode())
                self._client.hset(self._keys.of("notes"), key, value)

    def forgotten_ms(self, user_ids: Sequence[int]) -> dict[int, int]:
        if not user_ids:
            return {}
        digests = [self.digest(user) for user in user_ids]
        with self.place.explained():
            values = self._client.hmget(self._keys.of("gone"), digests)
        return {
            user: self.seals.open_forgotten(digest, value)
            for user, digest, value in zip(user_ids, digests, values, strict=True)
            if value is not None
        }

    def look(self, user_ids: Sequence[int] | Integers, look: Look) -> None:
        self.edit(user_ids, lambda user_id, state: look(user_id, state))

    def check_engine(self) -> int:
        """Looks for users whose keys are there and who are not listed; opens every entry of those forgotten."""
        listed = set(self.user_ids().tolist())
        with self.place.explained():
            for user in self._keys.users_of(self._client):
                if user not in listed and user not in self.user_ids():
                    raise self.seals.damaged(f"the entry of user {user} in {REGISTRY_PLACE}", "is missing")
            num_forgotten = 0
            for digest, value in self._client.hscan_iter(self._keys.of("gone"), count=SCAN_COUNT):
                self.seals.open_forgotten(digest, value)
                num_forgotten += 1
        return num_forgotten

    def edit(self, user_ids: Sequence[int] | Integers, edit: Edit) -> None:
        for user in user_ids:
            self._edit_one(int(user), edit)

    def _edit_one(self, user_id: int, edit: Edit) -> None:
        from redis.exceptions import WatchError

        watched = [self._keys.user(user_id, "head"), self._keys.user(user_id, "recent"), self._keys.of("gone")]
        with self.place.explained(), self._client.pipeline() as pipe:
            while True:
                try:
                    pipe.watch(*watched)
                    change = edit(user_id, self._state(pipe, user_id))
                    if change is None:
                        return
                    self.seals.check_writable()
                    pipe.multi()
                    self._apply(pipe, user_id, change)
                    reach("sequences:before-commit")
                    pipe.execute()
                    reach("sequences:after-commit")
                    return
                except WatchError:
                    continue

    def _append(self, users: list[tuple[int, Integers]], columns: Columns) -> Appended:
        self.seals.check_writable()
        columns = self.coded(columns)
        times, received = columns["time_ms"].values.tolist(), columns["received_ms"].values.tolist()
        packed = self.codec.pack(columns)
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
            limit, events = -1, []  # The script says no, and the events go the other way.
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
        """(taken in, refused) of events that are late, or fill the buffer."""
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

        self._edit_one(user, edit)
        return counts

    def _read(self, user_ids: list[int], query: Query) -> list[dict[str, Values]]:
        results: list[dict[str, Values]] = []
        with self.place.explained():
            for step in in_steps(user_ids, USERS_PER_CALL):
                results += self._read_step(step, query)
        return results

    def _read_step(self, user_ids: list[int], query: Query) -> list[dict[str, Values]]:
        """Reads of several users side by side: each round asks the server once for all that go on."""
        results: dict[int, dict[str, Values]] = {}
        waiting = list(range(len(user_ids)))
        while waiting:
            pipe = self._client.pipeline()
            for place in waiting:
                self._ask_head(pipe, user_ids[place])
            answers = pipe.execute()
            heads = {place: answers[3 * n : 3 * n + 3] for n, place in enumerate(waiting)}
            open_readings: dict[int, tuple[Reading, Request]] = {}
            for place in waiting:
                head, rows = self._parse_head(user_ids[place], *heads[place])
                self.num_bytes_read += sum(len(row[1]) for row in rows)
                reading = select(head, recent_columns(rows, self.codec), query, self.config)
                _advance(place, reading, None, open_readings, results)
            waiting = []
            while open_readings:
                pipe = self._client.pipeline()
                for place, (_, (names, chunks)) in open_readings.items():
                    pipe.hget(self._keys.user(user_ids[place], "head"), "directory")
                    pipe.hmget(self._keys.user(user_ids[place], "columns"), self._blob_names(names, chunks))
                answers = pipe.execute()
                asked, open_readings = open_readings, {}
                for n, (place, (reading, (names, chunks))) in enumerate(asked.items()):
                    directory, blobs = answers[2 * n : 2 * n + 2]
                    if directory != heads[place][0][0]:
                        waiting.append(place)  # A writer has moved events meanwhile.
                        continue
                    found = self._blobs(user_ids[place], names, chunks, blobs)
                    _advance(place, reading, found, open_readings, results)
        return [results[place] for place in range(len(user_ids))]

    def _forget(self, user_id: int, at_ms: int) -> int:
        num_events = 0

        def edit(_: int, state: State) -> Change:
            nonlocal num_events
            num_events = min(state.head.num_events, self.config.max_events)
            return Change(Head(), clear_recent=True)

        self.seals.check_writable()
        with self.place.explained():
            # First: from here on, no client takes in what was received before.
            digest = self.digest(user_id)
            self._client.hset(self._keys.of("gone"), digest, self.seals.seal_forgotten(digest, at_ms))
        self._edit_one(user_id, edit)
        return num_events

    def _scrub(self) -> None:
        """Nothing: memory that was freed holds no keys, and the server's files are its operator's."""

    def read_names(self, kind: str) -> list[str]:
        with self.place.explained():
            return self.seals.open_names(kind, self._client.hgetall(self._keys.of(f"words:{kind}")))

    def _add_names(self, kind: str, names: Sequence[str]) -> None:
        self.seals.check_writable()
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        with self.place.explained():
            arguments = [self.seals.salt, f"{names_place(kind)}:", *encoded]
            if self._name_script(keys=[self._keys.of(f"words:{kind}")], args=arguments) < 0:
                raise self.seals.damaged(names_place(kind))

    def _ask_head(self, pipe: Any, user_id: int) -> list[Any]:
        """What `_parse_head` takes: the answers of the server, or of a pipeline, which gives them later."""
        head, recent, columns = (self._keys.user(user_id, part) for part in PARTS)
        return [pipe.hmget(head, ["directory", "recent"]), pipe.hgetall(recent), pipe.hlen(columns)]

    def _parse_head(
        self, user_id: int, state: Sequence[bytes | None], recent: Mapping[bytes, bytes], num_columns: int
    ) -> tuple[Head, list[RecentRow]]:
        directory, count = state
        head = Head() if directory is None else self.seals.open_head(user_id, directory)
        if num_columns != len(head.chunks) * len(self._numbers):
            raise self.seals.damaged(head_place(user_id), f"does not fit {num_columns} stored columns")
        try:
            num_recent = int(count or 0) if self.seals.has_seals else len(recent)
            held = [(*split_event_key(key), value) for key, value in recent.items()]
        except (ValueError, struct.error):
            raise self.seals.damaged(recent_place(user_id)) from None
        rows = self.seals.open_recent(user_id, held, num_recent)
        return dataclasses.replace(head, num_recent=len(rows), next_arrival=len(rows)), rows

    def _state(self, pipe: Any, user_id: int) -> State:
        """A user's state, read while its keys are watched."""
        from redis.exceptions import WatchError

        answers = self._ask_head(pipe, user_id)
        try:
            head, rows = self._parse_head(user_id, *answers)
        except CorruptFileError:
            # The three were not read at one instant.
            if self._ask_head(pipe, user_id) == answers:
                raise
            raise WatchError("another client has moved the events meanwhile") from None

        def load(names: Sequence[str], chunks: Sequence[int]) -> dict[tuple[str, int], bytes]:
            blobs = pipe.hmget(self._keys.user(user_id, "columns"), self._blob_names(names, chunks))
            if None in blobs and pipe.hget(self._keys.user(user_id, "head"), "directory") != answers[0][0]:
                raise WatchError("another client has moved the events meanwhile")
            return self._blobs(user_id, names, chunks, blobs)

        return State(head, recent_columns(rows, self.codec), load)

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

    def _blobs(
        self, user_id: int, names: Sequence[str], chunks: Sequence[int], blobs: Sequence[bytes | None]
    ) -> dict[tuple[str, int], bytes]:
        keys = [(name, chunk) for name in names for chunk in chunks]
        found = self.seals.open_columns(user_id, dict(zip(keys, blobs, strict=True)), names, chunks)
        self.num_bytes_read += sum(map(len, found.values()))
        return found


def registry_entry(seals: Seals, user_id: int) -> bytes:
    """What stands beside a user in the list of users: nothing but the seal."""
    return seals.seal(b"", REGISTRY_PLACE, b"%d" % user_id)


def _advance(
    place: int,
    reading: Reading,
    blobs: Mapping[tuple[str, int], bytes] | None,
    open_readings: dict[int, tuple[Reading, Request]],
    results: dict[int, dict[str, Values]],
) -> None:
    """Sends a reading what it asked for; notes what it asks for next, or its result."""
    try:
        request = next(reading) if blobs is None else reading.send(blobs)
    except StopIteration as end:
        results[place] = end.value
    else:
        open_readings[place] = (reading, request)
