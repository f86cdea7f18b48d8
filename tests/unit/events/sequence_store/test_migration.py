"""What a migration refuses, and that an older process cannot write into what it left; tests/golden migrates the stores
that version 1 wrote, and tests/chaos kills a migration."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.core.errors import CorruptFileError
from tackboard.events.sequence_store.migration import migrate_store
from tackboard.events.sequence_store.opening import create_store, open_store

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "golden"))
from golden_redis import GOLDEN, load_redis


def test_todays_store_is_left_alone(place: str) -> None:
    create_store(place).close()
    assert migrate_store(place) is None


def test_an_old_store_that_contradicts_itself_is_not_sealed(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    shutil.copy(GOLDEN / "sequences-v1.db", path)
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM columns WHERE user_id = 2 AND number = 3")
    database.close()
    with pytest.raises(CorruptFileError, match="column time_ms of chunk . of user 2 is missing"):
        migrate_store(path)
    with open_store(path) as store:
        assert store.seals.version == 1 and store.read(1).num_events == 15


def test_a_process_that_opened_a_file_before_cannot_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    shutil.copy(GOLDEN / "sequences-v1.db", path)
    old = sqlite3.connect(path, isolation_level=None)
    assert old.execute("SELECT count(*) FROM users").fetchone() == (2,)
    assert migrate_store(path) is not None
    for statement in ("INSERT OR REPLACE INTO users VALUES (1, x'00')", "INSERT INTO columns VALUES (1, 0, 99, x'00')"):
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            old.execute(statement)
    old.close()


def test_a_client_that_opened_a_server_before_cannot_write_to_it(redis_server: RedisServer) -> None:
    import redis

    prefix = f"old-{time.time_ns()}"
    with redis.Redis.from_url(redis_server.url) as client:
        load_redis(client, 1, prefix)
        assert migrate_store(f"{redis_server.url}?prefix={prefix}") is not None
        # What version 1 asked for first in an append, and did first in a forget.
        for command in (("HGET", f"{prefix}:forgotten", "x"), ("HSET", f"{prefix}:forgotten", "x", "1")):
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                client.execute_command(*command)
        assert not client.exists(f"{prefix}:users", f"{prefix}:names:action")
