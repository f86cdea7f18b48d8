"""A sequence store of each past format version is read today, and can be written to once it is migrated.

sequences-v1.db, sequences-v2.db and the keys in sequences-v1-redis.json and sequences-v2-redis.json hold thirty events
of two users, some late, and one user who was forgotten; all but the first have events in the buffer.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.core.errors import UsageError
from tackboard.events.sequence_store import open_store
from tackboard.events.sequence_store.migration import migrate_store
from tackboard.events.sequence_store.verification import verify_store

sys.path.insert(0, str(Path(__file__).parent))
from golden_redis import load_redis

GOLDEN = Path(__file__).parent
START_MS = 1_700_000_000_000
EVENT = {"item_id": 1, "action": "view", "surface": "home", "time_ms": START_MS, "received_ms": START_MS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("NOT TESTED: the sequence store on Redis; there is no redis-server (apt-get install redis-server)")
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[int, str]:
    """Version → a copy of its store."""
    if request.param == "sqlite":
        for version in (1, 2):
            shutil.copy(GOLDEN / f"sequences-v{version}.db", tmp_path)
        return {version: str(tmp_path / f"sequences-v{version}.db") for version in (1, 2)}
    import redis

    running = request.getfixturevalue("server")
    prefixes = {version: f"v{version}-{time.time_ns()}" for version in (1, 2)}
    with redis.Redis.from_url(running.url) as client:
        for version, prefix in prefixes.items():
            load_redis(client, version, prefix)
    return {version: f"{running.url}?prefix={prefix}" for version, prefix in prefixes.items()}


def check_held(store: Any) -> None:
    assert store.config.fields == {"request": "string", "position": "int", "dwell": "float", "is_paid": "bool"}
    assert store.user_ids().tolist() == [1, 2]
    for user in (1, 2):
        numbers = sorted(range(user - 1, 30, 2), key=lambda n: n * 37 % 30)
        assert store.read(user).rows() == [
            {
                "item_id": n * 10**15,
                "action": ["view", "save", "hide"][n % 3],
                "surface": "home",
                "time_ms": START_MS + (n * 37 % 30) * 60_000,
                "received_ms": START_MS + n * 60_000 + 5,
                "request": None if n % 5 == 0 else f"r{n // 3}",
                "position": None if n % 4 == 0 else n % 7,
                "dwell": n / 4,
                "is_paid": n % 6 == 0,
            }
            for n in numbers
        ]


def check_writing(store: Any) -> None:
    assert store.append(3, [EVENT]).num_forgotten == 1, "who was forgotten stays forgotten"
    assert store.append(1, [EVENT]).num_events == 1
    assert store.append(1, [{**EVENT, "time_ms": START_MS + 10**9, "action": "new"}]).num_events == 1
    assert store.read(1, ["action"], last=1).columns["action"].to_pylist() == ["new"]
    assert store.stats()["num_events"] == 32
    verify_store(store)


def test_sequence_store_version_1_is_read_and_says_how_it_can_be_written_to(urls: dict[int, str]) -> None:
    with open_store(urls[1]) as store:
        check_held(store)
        assert not verify_store(store).has_checksums
        for write in (
            lambda: store.append(1, [EVENT]),
            lambda: store.forget(1),
            lambda: store.retain(1),
            lambda: store.set_note("a", "b"),
        ):
            with pytest.raises(UsageError, match="tackboard sequences migrate"):
                write()
        check_held(store)


def test_sequence_store_version_1_is_migrated(urls: dict[int, str]) -> None:
    report = migrate_store(urls[1])
    assert report is not None and report.has_checksums
    assert (report.num_users, report.num_events, report.num_forgotten_users) == (2, 30, 1)
    assert migrate_store(urls[1]) is None
    with open_store(urls[1]) as store:
        check_held(store)
        check_writing(store)


def test_sequence_store_version_2(urls: dict[int, str]) -> None:
    with open_store(urls[2]) as store:
        check_held(store)
        assert verify_store(store).has_checksums
        check_writing(store)
