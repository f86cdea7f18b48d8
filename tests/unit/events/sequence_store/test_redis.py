from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
from sequence_model import SMALL, event

from tackboard.bench.redis_server import RedisServer
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.engine import Appended, Update
from tackboard.events.sequence_store.merging import Change
from tackboard.events.sequence_store.redis import EXACT, RedisStore, create_redis


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    found = f"{redis_server.url}?prefix=test-{time.time_ns()}"
    create_redis(found, SMALL)
    return found


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    with RedisStore(url) as opened:
        yield opened


def test_no_server_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="start one with `redis-server`") as caught:
        RedisStore("redis://someone:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


def test_no_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install 'redis>=7'"):
        RedisStore("redis://127.0.0.1/0")


def test_a_url_that_means_nothing() -> None:
    with pytest.raises(UsageError, match="is not a number"):
        RedisStore("redis://host:port/0")


def test_stores_of_two_prefixes_do_not_meet(redis_server: RedisServer, store: RedisStore) -> None:
    other_url = f"{redis_server.url}?prefix=other-{time.time_ns()}"
    create_redis(other_url, SMALL)
    with RedisStore(other_url) as other:
        store.append(1, [event(1)])
        assert other.read(1).num_events == 0 and other.user_ids().tolist() == []
    with pytest.raises(UsageError, match="holds a store already"):
        create_redis(other_url, SMALL)


def test_a_newer_store_is_refused(url: str, store: RedisStore) -> None:
    store._client.hset(store._keys.of("meta"), "format_version", FORMAT_VERSION + 1)
    with pytest.raises(DataError, match=f"allowed: up to {FORMAT_VERSION}"):
        RedisStore(url)


def test_a_lost_chunk_is_named(store: RedisStore) -> None:
    store.append(1, [event(n) for n in range(20)])
    store._client.delete(store._keys.user(1, "columns"))
    with pytest.raises(CorruptFileError, match="does not match the 0 columns that are stored"):
        store.read(1)


def test_forgetting_leaves_no_key(store: RedisStore) -> None:
    store.append(1, [event(n, n, query="secret") for n in range(20)])
    store.append(1, [event(30, query="secret")])
    assert store.forget(1) == 21
    assert list(store._client.scan_iter(store._keys.of("{*"))) == []
    assert store.append(1, [event(40)]) == Appended(0, 0, 1)


def test_times_that_a_double_cannot_hold(store: RedisStore) -> None:
    times = [EXACT + 1, EXACT, EXACT + 2, 2**62]
    assert store.append(1, [event(t) for t in times]).num_events == 4
    assert store.append(1, [event(EXACT + 1)]).num_duplicates == 1
    assert store.read(1, ["time_ms"]).columns["time_ms"].values.tolist() == sorted(times)


def test_clients_at_once_lose_nothing(url: str) -> None:
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with RedisStore(url) as store:
                for n in range(60):
                    # Every third is late, so that all ways of writing meet each other.
                    store.append(1, [event(n * 10 - (n % 3) * 95 + 1000, number * 1000 + n)])
                    mine = store.read(1, ["item_id"], last=50).columns["item_id"].values
                    assert len(set(mine.tolist())) == len(mine)
        except BaseException as error:
            errors.append(error)
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors
    times = sorted(n * 10 - (n % 3) * 95 + 1000 for n in range(60) for _ in range(3))
    with RedisStore(url) as store:
        assert store.read(1, ["time_ms"]).columns["time_ms"].values.tolist() == times[-50:]
        head = store._client.hgetall(store._keys.user(1, "head"))
        assert store.seals.open_head(1, head[b"directory"]).num_chunked <= 50 + 10


def test_a_decision_is_made_again_where_another_client_was_faster(url: str, store: RedisStore) -> None:
    store.append(1, [event(1)])
    seen: list[int] = []
    with RedisStore(url) as other:

        def decide() -> Update:
            (found,) = store._fetch([1])
            seen.append(found.head.num_events)
            if len(seen) == 1:
                other.append(1, [event(2)])
            return Update({1: Change(Head(), clear_recent=True)})

        store._update(decide, users=[1])
    assert seen == [1, 2] and store.user_ids().tolist() == []


def test_many_users_are_read_in_a_few_rounds(store: RedisStore) -> None:
    users = list(range(600))
    owners = [user for user in users for _ in range(12)]
    store.append_many(owners, [event(n % 12, user) for n, user in enumerate(owners)])
    calls: list[int] = []
    execute = store._client.pipeline

    def counted(*arguments: object, **options: object) -> object:
        calls.append(1)
        return execute(*arguments, **options)

    store._client.pipeline = counted
    found = store.read_many(users, ["item_id"], last=11)
    assert found.columns["item_id"].values.tolist() == [user for user in users for _ in range(11)]
    assert len(calls) == 2 * 3


def test_durability_is_the_servers(store: RedisStore) -> None:
    assert "lost when the server dies" in store.durability()
    assert store.stats()["engine"] == "redis"
