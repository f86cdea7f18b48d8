"""Makes up data for `tackboard bench features`: events, items, users and requests with candidates.

This module takes a seed and sizes and makes five Arrow tables, which are the same for every contender. The tables are
written as uncompressed Arrow files, because a rival runs in its own Python environment. Decided: the data has the
awkward parts of real logs. The popularity of items follows a power law, users have 50 to 500 events, 3% of the events
are received late, some attributes are missing, brands are spelt in several ways (case, spaces, composed and decomposed
accents), and some candidates have unknown ids.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

DAY_MS = 86_400_000
END_MS = 1_793_491_200_000
"""The end of the log, 2026-11-01 00:00 UTC. The requests span the end of summer time in Berlin, which tests `hour`."""
LOG_DAYS = 60
REQUEST_DAYS = 21
"""Requests lie in the last 21 days of the log, so that each request has a history."""
WIDTH = 16
"""Number of values in an embedding."""
ACTIONS = ("view", "click", "save", "hide")
ACTION_SHARES = (0.62, 0.25, 0.09, 0.04)
SURFACES = ("home", "search", "related")
COUNTRIES = ("DE", "US", "BR", "IN", "FR", "JP", "MX", "GB", "ES", "IT", "PL", "NG")
DEVICES = ("phone", "Phone", "PHONE", "tablet", "Desktop", "desktop", "tv")
NUM_CATEGORIES = 40
BRAND_WORDS = ("Café", "Müller", "Ångström", "Olé", "North", "Oak", "Iron", "Vega", "Lumen", "Señor", "Atlas", "Brio")
TITLE_WORDS = ("Chair", "Lamp", "Table", "Rug", "Vase", "Mug", "Shelf", "Print", "Quilt", "Clock", "Tray", "Stool")
TABLES = ("events", "items", "users", "requests", "rows")

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSizes:
    """The sizes of the data and the numbers of measurements."""

    num_users: int = 2_000
    num_items: int = 20_000
    num_requests: int = 20_000
    num_candidates: int = 10
    """Number of candidates of each request in the batch. The batch has num_requests × num_candidates rows."""
    online_requests: int = 20
    """Number of different online requests, each of a different user."""
    online_candidates: int = 1_000
    online_events: int = 200
    """Number of events in the history of each online user."""
    batch_repeats: int = 9
    online_repeats: int = 400
    """Number of online requests measured per contender after the warm-up. They cycle through the different requests."""
    rounds: int = 3
    """Number of turns of each contender. The measurements of a contender are spread over its turns."""


FULL = FeatureSizes()
QUICK = FeatureSizes(
    num_users=60,
    num_items=500,
    num_requests=200,
    online_requests=4,
    online_candidates=100,
    batch_repeats=2,
    online_repeats=12,
    rounds=1,
)


@dataclasses.dataclass(frozen=True)
class World:
    """The five tables. `rows` has one row per candidate, with the row number of its request (`request`) and `item_id`.

    Events are sorted by (user_id, time_ms, order), items and users by id, requests by (user_id, request_ms), and rows
    by request.
    """

    events: pa.Table
    items: pa.Table
    users: pa.Table
    requests: pa.Table
    rows: pa.Table

    def write(self, folder: Path) -> None:
        """Writes one Arrow file per table."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            write_table(folder / f"{name}.arrow", getattr(self, name))


def read_world(folder: Path) -> World:
    """Reads into memory the tables that `World.write` wrote."""
    return World(**{name: read_table(folder / f"{name}.arrow") for name in TABLES})


def read_table(path: Path) -> pa.Table:
    """Reads one Arrow file."""
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all()


def write_table(path: Path, table: pa.Table) -> None:
    """Writes one Arrow file; the inverse of `read_table`."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def batch_world(sizes: FeatureSizes, seed: int) -> World:
    """Makes many users, and many requests with few candidates each, as in a training set."""
    random = np.random.default_rng(seed)
    items = _items(random, sizes.num_items)
    users = _users(random, sizes.num_users)
    lengths = np.clip(random.lognormal(4.45, 0.55, sizes.num_users), 50, 500).astype(np.int64)
    events = _events(random, users, items, lengths)
    requests = _requests(random, users, sizes.num_requests)
    rows = _rows(random, items, sizes.num_requests, sizes.num_candidates)
    return World(events, items, users, requests, rows)


def online_world(sizes: FeatureSizes, seed: int) -> World:
    """Makes a few users. Each user has one request with many candidates, like the requests that a server receives."""
    random = np.random.default_rng(seed + 1)
    items = _items(random, sizes.num_items)
    users = _users(random, sizes.online_requests)
    lengths = np.full(sizes.online_requests, sizes.online_events, dtype=np.int64)
    # Every event is received before the request, because an online store cannot hold later events.
    events = _events(random, users, items, lengths, end_ms=END_MS - 3 * DAY_MS)
    requests = pa.table(
        {
            "user_id": users["user_id"],
            "request_ms": pa.array(END_MS - random.integers(0, DAY_MS, sizes.online_requests)),
            "device": _strings(random, DEVICES, sizes.online_requests),
        }
    )
    rows = _rows(random, items, sizes.online_requests, sizes.online_candidates)
    return World(events, items, users, requests, rows)


def _ids(random: np.random.Generator, count: int) -> Ints:
    return np.unique(random.integers(1, 1 << 62, count + 64))[:count]


def _strings(random: np.random.Generator, words: tuple[str, ...], count: int, missing: float = 0.0) -> pa.Array:
    """Draws strings and returns them as a dictionary array. `missing` is the share of missing strings."""
    return _coded(random, random.integers(0, len(words), count), words, missing)


def _coded(random: np.random.Generator, codes: Any, words: Any, missing: float = 0.0) -> pa.Array:
    mask = random.random(len(codes)) < missing
    indices = pa.array(np.asarray(codes, dtype=np.int32), mask=mask)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(words), type=pa.string()))


def _numbers(random: np.random.Generator, values: NDArray[Any], missing: float) -> pa.Array:
    return pa.array(values, mask=random.random(len(values)) < missing)


def _vectors(random: np.random.Generator, count: int, missing: float) -> pa.Array:
    values = random.normal(size=(count, WIDTH)).astype(np.float32)
    values[: max(1, count // 500)] = 0.0  # A zero vector has no direction, and its cosine must not become a NaN.
    mask = pa.array(random.random(count) < missing)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH, mask=mask)


def _items(random: np.random.Generator, count: int) -> pa.Table:
    views = (2_000_000 / (np.arange(count) + 10) * random.lognormal(0, 0.5, count)).astype(np.int64)
    random.shuffle(views)
    price = np.round(random.lognormal(3.2, 0.9, count), 2)
    category = _power_law(random, NUM_CATEGORIES, count)
    return pa.table(
        {
            "item_id": pa.array(_ids(random, count)),
            "price": _numbers(random, price, 0.08),
            "list_price": _numbers(random, np.round(price * random.choice([1.0, 1.0, 1.25, 1.5], count), 2), 0.1),
            "rating": _numbers(random, np.round(random.uniform(1, 5, count), 1), 0.3),
            "editor_rating": _numbers(random, np.round(random.uniform(1, 5, count), 1), 0.5),
            "views": pa.array(views),
            "clicks": pa.array((views * random.beta(2, 40, count)).astype(np.int64)),
            "category": _coded(random, category, [f"category-{number:02d}" for number in range(NUM_CATEGORIES)], 0.03),
            "brand": _brands(random, count),
            "title": _titles(random, count),
            "born": _numbers(random, END_MS - random.integers(0, 900 * DAY_MS, count), 0.02),
            "embedding": _vectors(random, count, 0.05),
        }
    )


def _brands(random: np.random.Generator, count: int) -> pa.Array:
    """Draws from 800 brands. Each brand is spelt in up to four ways, which become equal by normalisation."""
    spellings: list[str] = []
    for number in range(800):
        name = f"{BRAND_WORDS[number % len(BRAND_WORDS)]} {BRAND_WORDS[number // 7 % len(BRAND_WORDS)]} {number}"
        spellings += [name, name.upper(), f" {name}\t", unicodedata.normalize("NFD", name)]
    words = list(dict.fromkeys(spellings))  # If a name has no accents, its last spelling equals its first.
    return _coded(random, _power_law(random, len(words), count), words, 0.04)


def _titles(random: np.random.Generator, count: int) -> pa.Array:
    first, second = random.integers(0, len(TITLE_WORDS), (2, count))
    number, offer = random.integers(0, 5_000, count), random.integers(0, 8, count)
    ending = ("", "", "", "", "", " on SALE", " (sale)", " Salerno")
    titles = [
        f"{TITLE_WORDS[a]} {TITLE_WORDS[b]} No. {n}{ending[o]}"
        for a, b, n, o in zip(first, second, number, offer, strict=True)
    ]
    return pa.array(titles).dictionary_encode()


def _users(random: np.random.Generator, count: int) -> pa.Table:
    return pa.table(
        {
            "user_id": pa.array(_ids(random, count)),
            "country": _strings(random, COUNTRIES, count, 0.06),
            "age": _numbers(random, random.integers(13, 90, count), 0.2),
            "budget": _numbers(random, np.round(random.lognormal(3.5, 0.7, count), 2), 0.1),
            "born": _numbers(random, END_MS - random.integers(LOG_DAYS * DAY_MS, 2_000 * DAY_MS, count), 0.01),
            "taste": _vectors(random, count, 0.1),
        }
    )


def _events(
    random: np.random.Generator, users: pa.Table, items: pa.Table, lengths: Ints, end_ms: int = END_MS
) -> pa.Table:
    count = int(lengths.sum())
    user = np.repeat(users["user_id"].to_numpy(), lengths)
    # The events of a user are grouped into visits, which last at most 20 minutes.
    visit = random.integers(0, (LOG_DAYS - 1) * 4, count)
    time_ms = end_ms - LOG_DAYS * DAY_MS + visit * (DAY_MS // 4) + random.integers(0, 1_200_000, count)
    late = random.random(count) < 0.03
    delay = np.where(late, random.integers(60_000, 2 * DAY_MS, count), random.integers(50, 5_000, count))
    item = _power_law(random, len(items), count)
    order = np.arange(count)
    placed = np.lexsort((order, time_ms, user))
    categories = items["category"].combine_chunks()
    return pa.table(
        {
            "user_id": pa.array(user[placed]),
            "item_id": items["item_id"].take(pa.array(item)),
            "action": _coded(random, random.choice(len(ACTIONS), count, p=ACTION_SHARES), ACTIONS),
            "surface": _strings(random, SURFACES, count),
            "time_ms": pa.array(time_ms[placed]),
            "received_ms": pa.array((time_ms + delay)[placed]),
            "order": pa.array(order),
            "dwell_ms": _numbers(random, random.lognormal(8.5, 1.2, count).astype(np.int64), 0.15),
            "category": categories.take(pa.array(item)),
        }
    )


def _requests(random: np.random.Generator, users: pa.Table, count: int) -> pa.Table:
    user = users["user_id"].to_numpy()[random.integers(0, len(users), count)]
    request_ms = END_MS - random.integers(0, REQUEST_DAYS * DAY_MS, count)
    placed = np.lexsort((request_ms, user))
    return pa.table(
        {
            "user_id": pa.array(user[placed]),
            "request_ms": pa.array(request_ms[placed]),
            "device": _strings(random, DEVICES, count),
        }
    )


def _rows(random: np.random.Generator, items: pa.Table, num_requests: int, num_candidates: int) -> pa.Table:
    known = items["item_id"].to_numpy()
    item = known[_power_law(random, len(known), num_requests * num_candidates)]
    unseen = random.random(len(item)) < 0.01
    item = np.where(unseen, random.integers(-(1 << 62), -1, len(item)), item)
    return pa.table(
        {"request": pa.array(np.repeat(np.arange(num_requests), num_candidates)), "item_id": pa.array(item)}
    )


def _power_law(random: np.random.Generator, size: int, count: int) -> Ints:
    """Draws `count` numbers below `size`. The probability of number k is proportional to 1 / (k + 10) ** 0.9."""
    weights = 1.0 / (np.arange(size) + 10.0) ** 0.9
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative, random.random(count) * cumulative[-1], side="right").astype(np.int64)
