"""A store of each engine, empty, and a real Redis server on a port of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.opening import create_store

sys.path.insert(0, str(Path(__file__).parent))
from sequence_model import SMALL


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("NOT TESTED: the sequence store on Redis; there is no redis-server (apt-get install redis-server)")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of either engine at which there is nothing."""
    if request.param == "sqlite":
        return str(tmp_path / "sequences.db")
    server = request.getfixturevalue("redis_server")
    return f"{server.url}?prefix={time.time_ns()}"


@pytest.fixture
def make_store(place: str) -> Iterator[Callable[..., SequenceStore]]:
    opened: list[SequenceStore] = []

    def make(config: StoreConfig = SMALL) -> SequenceStore:
        opened.append(create_store(place, config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., SequenceStore]) -> SequenceStore:
    return make_store()
