"""`tackboard bench sequences` measures appends to the sequence store and reads from it, on SQLite and on Redis.

An engine is SQLite or Redis with one setting of durability. Each engine stores the same users in its own folder. Before
anything is timed, events are read back and compared with the appended events. Then the engines take turns at every case
(`turns`). Each figure is for one client that waits for every answer. Times are wall-clock times, because an append
waits for the disk. The report names what each engine guarantees once it has acknowledged an append, because a stronger
guarantee costs time. It also says if a run was disturbed.

    append    one event per call, or 100 or 1,000 events of many users per call; measures events per second and the time
              of a call. If new events do not fit in a user's buffer, the call also merges the buffer into chunks
    read      the last 256 events or all events of a user with 256 or 16,000 events, in two columns or in all columns;
              measures reads per second, the time of a call and bytes per read
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tackboard.bench.redis_server import RedisServer
from tackboard.bench.report import Report, Table, where_and_when
from tackboard.bench.turns import Neighbours, aim_lines, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.progress import say
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.opening import create_store
from tackboard.events.sequence_store.values import Values, object_array, same_columns, take
from tackboard.report.svg import percentile

SEED = 20261115
FIELDS = {"request": "int", "position": "int", "dwell_ms": "float", "is_paid": "bool"}
TWO = ["item_id", "action"]
SHORT, LONG = 256, 16_000
ENGINES = {
    "sqlite_full": "SQLite, synchronous=full",
    "sqlite_normal": "SQLite, synchronous=normal",
    "redis_always": "Redis, appendfsync=always",
    "redis_everysec": "Redis, appendfsync=everysec",
}
SKIPPED = "skipped: no redis-server"
ROUNDS = 4
"""Number of turns that each engine takes in each case. The calls of a case are spread over the turns."""
APPENDS = {"append_1": 1, "append_100": 100, "append_1000": 1000}
READS: dict[str, tuple[int, int | None, list[str] | None]] = {
    "read_256_two": (SHORT, SHORT, TWO),
    "read_256_all": (SHORT, SHORT, None),
    "read_16000_last_256_two": (LONG, SHORT, TWO),
    "read_16000_last_256_all": (LONG, SHORT, None),
    "read_16000_two": (LONG, None, TWO),
    "read_16000_all": (LONG, None, None),
}
"""Name → (number of events of the user, number of events to read, columns to read). None stands for all."""
WORDS = {
    "append_1": "append one event",
    "append_100": "append 100 events of many users",
    "append_1000": "append 1,000 events of many users",
    "read_256_two": "256 events, 2 columns",
    "read_256_all": "256 events, all columns",
    "read_16000_last_256_two": "last 256 of 16,000, 2 columns",
    "read_16000_last_256_all": "last 256 of 16,000, all columns",
    "read_16000_two": "all 16,000, 2 columns",
    "read_16000_all": "all 16,000, all columns",
}


@dataclass(frozen=True)
class StoreSizes:
    """The numbers of users and calls in a measurement."""

    num_short: int
    """Number of users with 256 events. The measured appends go to these users."""
    num_long: int
    """Number of users with 16,000 events."""
    num_calls: int
    """Number of calls of each case that appends 1 event or reads 256 events. With more events there are fewer calls."""


FULL, QUICK = (
    StoreSizes(num_short=1000, num_long=20, num_calls=2000),
    StoreSizes(num_short=20, num_long=1, num_calls=20),
)


def measure(folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Measures every engine, with its files in `folder`. Raises TackboardError if an engine returns wrong events."""
    sizes = QUICK if quick else FULL
    names = [name for name in ENGINES if not name.startswith("redis") or RedisServer.is_installed()]
    with ExitStack() as stack, Neighbours() as neighbours:
        measured = _measure_all({name: stack.enter_context(_store(name, folder / name)) for name in names}, sizes)
    return {
        "bench": "sequences",
        "quick": quick,
        "num_columns": len(StoreConfig(fields=FIELDS).columns),
        "num_users": {str(SHORT): sizes.num_short, str(LONG): sizes.num_long},
        "engines": {name: measured.get(name, SKIPPED) for name in ENGINES},
        **neighbours.report(),
        **where_and_when(),
    }


@contextmanager
def _store(name: str, folder: Path) -> Iterator[SequenceStore]:
    """Opens an empty store of the engine `name` (see ENGINES)."""
    folder.mkdir(parents=True)
    engine, _, setting = name.partition("_")
    config = StoreConfig(fields=FIELDS)
    if engine == "sqlite":
        with create_store(folder / "sequences.db", config, synchronous=setting) as store:
            yield store
        return
    with RedisServer(folder, appendfsync=setting) as server, create_store(server.url, config) as store:
        yield store


def _measure_all(stores: Mapping[str, SequenceStore], sizes: StoreSizes) -> dict[str, dict[str, Any]]:
    users = {SHORT: range(sizes.num_short), LONG: range(10**6, 10**6 + sizes.num_long)}
    draws = {name: np.random.default_rng(SEED) for name in stores}
    for name, store in stores.items():
        say(f"filling: {ENGINES[name]}")
        for num_events, ids in users.items():
            for user in ids:
                columns = events(draws[name], num_events)
                store.append(user, columns)
                check(store, user, columns)
    figures: dict[str, dict[str, Any]] = {name: {"durability": store.durability()} for name, store in stores.items()}
    for case, (num_events, last, fields) in READS.items():
        say(WORDS[case])
        num_calls = max(10, sizes.num_calls // (10 if last is None else 1))
        reads = {name: _Reads(store, users[num_events], fields, last, num_calls) for name, store in stores.items()}
        for name, turns in take_turns({name: one.turn for name, one in reads.items()}, ROUNDS).items():
            figures[name][case] = _spread(turns, "reads_per_s", 1) | {"bytes_per_read": reads[name].bytes_per_read()}
    for name, store in stores.items():
        _fill_buffers(store, sizes, draws[name])
    for case, size in APPENDS.items():
        say(WORDS[case])
        appends = {name: _Appends(store, size, sizes, draws[name]) for name, store in stores.items()}
        for name, turns in take_turns({name: one.turn for name, one in appends.items()}, ROUNDS).items():
            figures[name][case] = _spread(turns, "events_per_s", size)
            appends[name].check()
    return figures


class _Reads:
    """Measures the time of reads of one kind. Each turn makes an equal share of the `num_calls` calls."""

    def __init__(
        self, store: SequenceStore, users: Sequence[int], fields: list[str] | None, last: int | None, num_calls: int
    ) -> None:
        self._store = store
        self._read = lambda number: store.read(users[number % len(users)], fields, last=last)
        self._read(0)
        self._bytes_before = store.num_bytes_read
        self._num_calls = -(-num_calls // ROUNDS)
        self._num_done = 0

    def turn(self) -> list[float]:
        first, self._num_done = self._num_done, self._num_done + self._num_calls
        return _time(self._read, range(first, self._num_done))

    def bytes_per_read(self) -> int:
        """Returns the mean number of bytes that a call fetched from the engine."""
        return round((self._store.num_bytes_read - self._bytes_before) / self._num_done)


def _fill_buffers(store: SequenceStore, sizes: StoreSizes, draw: np.random.Generator) -> None:
    """Fills each user's buffer to a random level, as in real use. Empty buffers would all become full at once."""
    users = np.repeat(np.arange(sizes.num_short), draw.integers(0, store.config.max_recent, sizes.num_short))
    if len(users):
        store.append_many(users, events(draw, len(users), 1_800_000_000_000))


class _Appends:
    """Measures the time of calls that append `size` events of random users, newer than all earlier events.

    Each turn makes an equal share of the calls.
    """

    def __init__(self, store: SequenceStore, size: int, sizes: StoreSizes, draw: np.random.Generator) -> None:
        self._store = store
        self._size = size
        self._num_calls = -(-max(5, sizes.num_calls // (1 if size == 1 else size // 25)) // ROUNDS)
        start = 1_900_000_000_000 + size * 10**12
        # The events of a call span less than 10**8 ms, so they are newer than the events of the previous call.
        self._calls = [
            (draw.integers(0, sizes.num_short, size), events(draw, size, start + number * 10**8))
            for number in range(ROUNDS * self._num_calls + 1)
        ]
        # A single event is a Python object, as in a request. Many events are columns, as in a log.
        self._plain = [(int(users[0]), _rows(columns)) for users, columns in self._calls] if size == 1 else []
        self._num_before = store.stats()["num_events"]
        self._append(0)
        self._num_done = 1

    def _append(self, number: int) -> None:
        if self._plain:
            self._store.append(*self._plain[number])
        else:
            self._store.append_many(*self._calls[number])

    def turn(self) -> list[float]:
        first, self._num_done = self._num_done, self._num_done + self._num_calls
        return _time(self._append, range(first, self._num_done))

    def check(self) -> None:
        """Raises TackboardError unless the store holds all appended events."""
        num_added = self._store.stats()["num_events"] - self._num_before
        if num_added != self._size * self._num_done:
            raise TackboardError(f"the store holds {num_added} instead of {self._size * self._num_done} new events")


def events(draw: np.random.Generator, num_events: int, start_ms: int = 1_700_000_000_000) -> dict[str, Values]:
    """Makes up events sorted by time, with item ids of up to 62 bits, eight actions, four surfaces and FIELDS."""
    times = start_ms + np.cumsum(draw.integers(1, 60_000, num_events))
    names = {kind: object_array([f"{kind} {number}" for number in range(8)]) for kind in ("action", "surface")}
    return {
        "item_id": Values(draw.integers(-(2**62), 2**62, num_events)),
        "action": Values(draw.integers(0, 8, num_events), None, names["action"]),
        "surface": Values(draw.integers(0, 4, num_events), None, names["surface"]),
        "time_ms": Values(times),
        "received_ms": Values(times + draw.integers(0, 5000, num_events)),
        "request": Values(draw.integers(0, 2**40, num_events)),
        "position": Values(draw.integers(0, 50, num_events), draw.random(num_events) < 0.9),
        "dwell_ms": Values(draw.random(num_events) * 1e5),
        "is_paid": Values(draw.random(num_events) < 0.1),
    }


def check(store: SequenceStore, user: int, columns: Mapping[str, Values]) -> None:
    """Raises TackboardError unless reads of all events and of the last events return exactly the appended events."""
    for last in (None, SHORT):
        for fields in (list(columns), TWO):
            found = store.read(user, fields, last=last).columns
            part = take(columns, slice(0 if last is None else -last, None))
            if not same_columns(found, {name: part[name] for name in fields}):
                raise TackboardError("the sequence store returned other events than the appended events")


def _rows(columns: Mapping[str, Values]) -> list[dict[str, Any]]:
    lists = {name: column.to_pylist() for name, column in columns.items()}
    return [{name: lists[name][row] for name in lists} for row in range(len(columns["item_id"]))]


def _time(call: Callable[[int], Any], numbers: range) -> list[float]:
    """Makes the calls one after the other and returns the seconds of each call."""
    seconds = []
    for number in numbers:
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return seconds


def _spread(turns: list[list[float]], rate: str, size: int) -> dict[str, Any]:
    seconds = [value for turn in turns for value in turn]
    return {
        rate: round(size * len(seconds) / sum(seconds)),
        "us_p50": round(percentile(seconds, 50) * 1e6, 1),
        "us_p99": round(percentile(seconds, 99) * 1e6, 1),
        "num_calls": len(seconds),
    }


# ---- the report ----


HEADER = ("measured", "per second", "p50 µs", "p99 µs", "bytes", "calls")


def _row(words: str, figure: Mapping[str, Any]) -> tuple[str, ...]:
    rate = figure.get("events_per_s", figure.get("reads_per_s", 0))
    times = [f"{figure[name]:,.0f}" for name in ("us_p50", "us_p99")]
    size = figure.get("bytes_per_read")
    return (words, f"{rate:,}", *times, "" if size is None else f"{size:,}", f"{figure['num_calls']:,}")


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    tables = []
    for name, words in ENGINES.items():
        figures = result["engines"][name]
        if isinstance(figures, str):
            tables.append(Table(words, HEADER, [], figures))
            continue
        rows = [_row(case_words, figures[case]) for case, case_words in WORDS.items()]
        tables.append(Table(words, HEADER, rows, figures["durability"]))
    return Report(
        result=result,
        theme="sequences",
        title="User sequences: embedded and on Redis",
        command=f"bench sequences{' --quick' if result['quick'] else ''}",
        words=[
            f"{result['num_users'][str(SHORT)]:,} users of {SHORT} events and {result['num_users'][str(LONG)]:,} of "
            f"{LONG:,}, {result['num_columns']} columns. The stored values were checked before the timing.",
            "One client waits for every answer. Redis runs on the same machine and is reached by loopback.",
            "Rates are events per second for appends and calls per second for reads. Times are per call. Bytes are the "
            "bytes that a read fetched from the engine.",
        ],
        tables=tables,
        notes=aim_lines(result),
    )
