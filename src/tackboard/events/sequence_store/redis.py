"""The engine for several hosts: a Redis server, the same sequences as in SQLite.

    PREFIX:meta                     settings
    PREFIX:names:action | surface   names and their numbers
    PREFIX:users                    set of the users with events
    PREFIX:forgotten                salted digest of a user → when it was forgotten
    PREFIX:notes                    texts of work that is done in steps
    PREFIX:{user}:head              counters and the directory of chunks
    PREFIX:{user}:recent            time and event → received, arrival: the buffer
    PREFIX:{user}:columns           column:chunk → bytes

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
import importlib.util
import secrets
import struct
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tackboard.core.errors import CorruptFileError, DataError, StorageError, TackboardError, UsageError
from tackboard.core.files import reach
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import Appended, Edit, SequenceStore, in_steps, visible
from tackboard.events.sequence_store.merging import Change, RecentRow, State, append_change, recent_columns
from tackboard.events.sequence_store.selection import Query, Reading, Request, select
from tackboard.events.sequence_store.values import Columns, Integers, Values, take

DEFAULT_PREFIX = "tackboard"
TIMEOUT_S = 30.0
USERS_PER_CALL = 256
EXACT = 1 << 53
"""The server's scripts count in doubles: what is not below this goes the slow way."""
_TIME = struct.Struct(">Q")
_APPEND = """
local head, recent, users, forgotten = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local num_events = (#ARGV - 4) / 3
local state = redis.call('HMGET', head, 'until', 'late', 'chunked', 'arrival')
local num_recent = redis.call('HLEN', recent)
local last = tonumber(state[1] or -1)
if num_recent + num_events > tonumber(ARGV[3]) then return {-1} end
local total = tonumber(state[3] or 0) + num_recent + num_events
if tonumber(state[2] or 0) > 0 and total > tonumber(ARGV[4]) then return {-1} end
for i = 5, #ARGV, 3 do
    if tonumber(ARGV[i]) <= last then return {-1} end
end
local gone = tonumber(redis.call('HGET', forgotten, ARGV[2]) or -1)
local arrival, added, refused = tonumber(state[4] or 0), 0, 0
for i = 5, #ARGV, 3 do
    if tonumber(ARGV[i + 1]) < gone then
        refused = refused + 1
    elseif redis.call('HSETNX', recent, ARGV[i + 2], ARGV[i + 1] .. ':' .. string.format('%.0f', arrival)) == 1 then
        arrival = arrival + 1
        added = added + 1
    end
end
if added > 0 then
    redis.call('HSET', head, 'arrival', string.format('%.0f', arrival))
    redis.call('SADD', users, ARGV[1])
end
return {added, refused}
"""
_NAME = """
for i = 1, #ARGV do
    redis.call('HSETNX', KEYS[1], ARGV[i], redis.call('HLEN', KEYS[1]))
end
"""


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Names of keys under one prefix."""

    prefix: str

    def of(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def user(self, user_id: int, part: str) -> str:
        return f"{self.prefix}:{{{user_id}}}:{part}"


def create_redis(url: str, config: StoreConfig) -> None:
    """Makes an empty store under the prefix of `url`; one that exists raises UsageError."""
    place = _Place.of(url)
    with place.explained(), contextlib.closing(place.connect()) as client:
        settings = {"format_version": FORMAT_VERSION, "config": config.to_json(), "salt": secrets.token_bytes(32)}
        keys = _Keys(place.prefix)
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
        self.place = _Place.of(url)
        self.url = url
        self._keys = _Keys(self.place.prefix)
        self._client = self.place.connect()
        with self.place.explained():
            settings = self._client.hgetall(self._keys.of("meta"))
        if not settings:
            self.close()
            raise UsageError(
                f"{self.place} holds no sequence store",
                fix=f"make one with `tackboard sequences append {self.place} FILE`",
            )
        version = int(settings[b"format_version"])
        if version > FORMAT_VERSION:
            self.close()
            raise DataError(
                f"{self.place} has format version {version}",
                allowed=f"allowed: up to {FORMAT_VERSION}",
                fix="use a newer tackboard",
            )
        super().__init__(StoreConfig.from_json(settings[b"config"].decode()), settings[b"salt"])
        self._numbers = {name: number for number, name in enumerate(self.config.columns)}
        self._append_script = self._client.register_script(_APPEND)
        self._name_script = self._client.register_script(_NAME)

    @staticmethod
    def exists(url: str) -> bool:
        """Whether there is a store at `url`."""
        place = _Place.of(url)
        with place.explained(), contextlib.closing(place.connect()) as client:
            return bool(client.exists(_Keys(place.prefix).of("meta")))

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
            members = self._client.smembers(self._keys.of("users"))
        return np.array(sorted(int(member) for member in members), dtype=np.int64)

    def stats(self) -> dict[str, Any]:
        users = self.user_ids()
        num_events = num_recent = 0
        with self.place.explained():
            for step in in_steps(users, USERS_PER_CALL):
                pipe = self._client.pipeline(transaction=False)
                for user in step:
                    pipe.hget(self._keys.user(user, "head"), "chunked").hlen(self._keys.user(user, "recent"))
                answers = pipe.execute()
                for chunked, recent in zip(answers[::2], answers[1::2], strict=True):
                    num_recent += recent
                    num_events += min(self.config.max_events, int(chunked or 0) + recent)
            num_forgotten = self._client.hlen(self._keys.of("forgotten"))
            num_bytes = int(self._client.info("memory")["used_memory"])
        return {
            "engine": "redis",
            "format_version": FORMAT_VERSION,
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
        return None if text is None else text.decode()

    def set_note(self, key: str, text: str | None) -> None:
        with self.place.explained():
            if text is None:
                self._client.hdel(self._keys.of("notes"), key)
            else:
                self._client.hset(self._keys.of("notes"), key, text)

    def forgotten_ms(self, user_ids: Sequence[int]) -> dict[int, int]:
        if not user_ids:
            return {}
        with self.place.explained():
            times = self._client.hmget(self._keys.of("forgotten"), [self.digest(user) for user in user_ids])
        return {user: int(time) for user, time in zip(user_ids, times, strict=True) if time is not None}

    def edit(self, user_ids: Sequence[int] | Integers, edit: Edit) -> None:
        for user in user_ids:
            self._edit_one(int(user), edit)

    def _edit_one(self, user_id: int, edit: Edit) -> None:
        from redis.exceptions import WatchError

        watched = [self._keys.user(user_id, "head"), self._keys.user(user_id, "recent"), self._keys.of("forgotten")]
        with self.place.explained(), self._client.pipeline() as pipe:
            while True:
                try:
                    pipe.watch(*watched)
                    change = edit(user_id, self._state(pipe, user_id))
                    if change is None:
                        return
                    pipe.multi()
                    self._apply(pipe, user_id, change)
                    reach("sequences:before-commit")
                    pipe.execute()
                    reach("sequences:after-commit")
                    return
                except WatchError:
                    continue

    def _append(self, users: list[tuple[int, Integers]], columns: Columns) -> Appended:
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
        keys = [self._keys.user(user, "head"), self._keys.user(user, "recent")]
        limit = self.config.recent_limit
        if len(events) > limit or max(max(event[:2]) for event in events) >= EXACT:
            limit, events = -1, []  # The script says no, and the events go the other way.
        arguments: list[Any] = [user, self.digest(user), limit, self.config.max_events]
        for time_ms, received_ms, event in events:
            arguments += (time_ms, received_ms, _TIME.pack(time_ms) + event)
        self._append_script(
            keys=[*keys, self._keys.of("users"), self._keys.of("forgotten")], args=arguments, client=pipe
        )

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
            heads = {place: answers[2 * n : 2 * n + 2] for n, place in enumerate(waiting)}
            open_readings: dict[int, tuple[Reading, Request]] = {}
            for place in waiting:
                head, rows = _parse_head(*heads[place])
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
                    _advance(place, reading, self._blobs(names, chunks, blobs), open_readings, results)
        return [results[place] for place in range(len(user_ids))]

    def _forget(self, user_id: int, at_ms: int) -> int:
        num_events = 0

        def edit(_: int, state: State) -> Change:
            nonlocal num_events
            num_events = min(state.head.num_events, self.config.max_events)
            return Change(Head(), clear_recent=True)

        with self.place.explained():
            # First: from here on, no client takes in what was received before.
            self._client.hset(self._keys.of("forgotten"), self.digest(user_id), at_ms)
        self._edit_one(user_id, edit)
        return num_events

    def _scrub(self) -> None:
        """Nothing: memory that was freed holds no keys, and the server's files are its operator's."""

    def _read_names(self, kind: str) -> list[str]:
        with self.place.explained():
            found = self._client.hgetall(self._keys.of(f"names:{kind}"))
        return [name.decode("utf-8", "surrogatepass") for name in sorted(found, key=lambda name: int(found[name]))]

    def _add_names(self, kind: str, names: Sequence[str]) -> None:
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        with self.place.explained():
            self._name_script(keys=[self._keys.of(f"names:{kind}")], args=encoded)

    def _ask_head(self, pipe: Any, user_id: int) -> None:
        pipe.hmget(self._keys.user(user_id, "head"), ["directory", "late", "arrival"])
        pipe.hgetall(self._keys.user(user_id, "recent"))

    def _state(self, pipe: Any, user_id: int) -> State:
        """A user's state, read while its keys are watched."""
        from redis.exceptions import WatchError

        answers = (
            pipe.hmget(self._keys.user(user_id, "head"), ["directory", "late", "arrival"]),
            pipe.hgetall(self._keys.user(user_id, "recent")),
        )
        head, rows = _parse_head(*answers)

        def load(names: Sequence[str], chunks: Sequence[int]) -> dict[tuple[str, int], bytes]:
            blobs = pipe.hmget(self._keys.user(user_id, "columns"), self._blob_names(names, chunks))
            if None in blobs and pipe.hget(self._keys.user(user_id, "head"), "directory") != answers[0][0]:
                raise WatchError("another client has moved the events meanwhile")
            return self._blobs(names, chunks, blobs)

        return State(head, recent_columns(rows, self.codec), load)

    def _apply(self, pipe: Any, user_id: int, change: Change) -> None:
        head, recent, columns = (self._keys.user(user_id, part) for part in ("head", "recent", "columns"))
        if change.is_empty:
            pipe.delete(head, recent, columns)
            pipe.srem(self._keys.of("users"), user_id)
            return
        if change.clear_recent:
            pipe.delete(recent)
        if change.drop_chunks:
            pipe.hdel(columns, *self._blob_names(list(self._numbers), change.drop_chunks))
        if change.put:
            pipe.hset(columns, mapping={f"{self._numbers[n]}:{chunk}": data for (n, chunk), data in change.put.items()})
        if change.add_recent:
            rows = {_TIME.pack(time) + event: f"{got}:{arrival}" for time, event, got, arrival in change.add_recent}
            pipe.hset(recent, mapping=rows)
        pipe.hset(
            head,
            mapping={
                "directory": change.head.to_bytes(),
                "late": change.head.num_late,
                "arrival": change.head.next_arrival,
                "until": change.head.chunked_until_ms,
                "chunked": change.head.num_chunked,
            },
        )
        pipe.sadd(self._keys.of("users"), user_id)

    def _blob_names(self, names: Sequence[str], chunks: Sequence[int]) -> list[str]:
        return [f"{self._numbers[name]}:{chunk}" for name in names for chunk in chunks]

    def _blobs(
        self, names: Sequence[str], chunks: Sequence[int], blobs: Sequence[bytes | None]
    ) -> dict[tuple[str, int], bytes]:
        keys = [(name, chunk) for name in names for chunk in chunks]
        found = {key: blob for key, blob in zip(keys, blobs, strict=True) if blob is not None}
        self.num_bytes_read += sum(map(len, found.values()))
        if len(found) < len(keys):
            raise CorruptFileError(f"{self.place} lacks a chunk that it should hold", fix="restore the server's data")
        return found


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


def _parse_head(state: Sequence[bytes | None], recent: Mapping[bytes, bytes]) -> tuple[Head, list[RecentRow]]:
    directory, late, arrival = state
    head = Head() if directory is None else Head.from_bytes(directory)
    rows = []
    for key, value in recent.items():
        received, _, number = value.partition(b":")
        rows.append((_TIME.unpack_from(key)[0], key[_TIME.size :], int(received), int(number)))
    changed = dataclasses.replace(head, num_recent=len(rows), num_late=int(late or 0), next_arrival=int(arrival or 0))
    return changed, rows


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a store is: a server's URL without our own option, and the prefix of its keys."""

    server: str
    prefix: str
    shown: str
    """The URL as errors show it: without a password."""

    @classmethod
    def of(cls, url: str) -> _Place:
        if importlib.util.find_spec("redis") is None:
            raise UsageError(
                "a store on Redis needs the package redis, which is not installed",
                fix=f"{sys.executable} -m pip install 'redis>=7'",
            )
        parts = urllib.parse.urlsplit(url)
        options = urllib.parse.parse_qsl(parts.query)
        prefix = dict(options).get("prefix", DEFAULT_PREFIX)
        rest = urllib.parse.urlencode([option for option in options if option[0] != "prefix"])
        try:
            shown = f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path}?prefix={prefix}"
        except ValueError:
            raise UsageError(
                "a Redis URL whose port is no number", allowed="redis://host:port/db?prefix=name"
            ) from None
        return cls(urllib.parse.urlunsplit(parts._replace(query=rest)), prefix, shown)

    def __str__(self) -> str:
        return self.shown

    def connect(self) -> Any:
        """A client of the server; nothing is sent yet."""
        import redis

        try:
            return redis.Redis.from_url(self.server, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self}: {error}", allowed="allowed: redis://host:port/db?prefix=name") from None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the client's errors into ours."""
        from redis import exceptions

        try:
            yield
        except exceptions.AuthenticationError as error:
            raise UsageError(f"{self}: {error}", fix="give redis://user:password@host:port/db") from error
        except (exceptions.BusyLoadingError, exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise UsageError(
                f"no Redis server answers at {self}: {error}", fix="start one with `redis-server`, or correct the URL"
            ) from error
        except exceptions.OutOfMemoryError as error:
            raise StorageError(f"{self}: {error}", fix="raise maxmemory of the server") from error
        except exceptions.RedisError as error:
            raise TackboardError(f"{self}: {type(error).__name__}: {error}") from error
