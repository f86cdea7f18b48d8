"""kill -9 while events are written to a sequence store: what was acknowledged is there, once, in order.

`make test` kills a few dozen times, `make test-slow` a few hundred.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.events.dataset import open_dataset
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.correction import compare
from tackboard.events.sequence_store.opening import create_store, open_store

if TYPE_CHECKING:
    from conftest import Nursery
else:
    Nursery = Any

HERE = Path(__file__).parent
KILLED = -9
CONFIG = StoreConfig(max_recent=7, chunk_events=10)
"""So small that most calls move events from the buffer into chunks."""
POINTS = ["sequences:after-delete", "sequences:after-insert", "sequences:before-commit", "sequences:after-commit"]


def writer(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sequence_writer.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    result: dict[str, Any] = json.loads(out.splitlines()[-1]) if out else {}
    return result


def redis_server(folder: Path, **options: str) -> RedisServer:
    if not RedisServer.is_installed():
        pytest.skip("NOT TESTED: the sequence store on Redis; there is no redis-server (apt-get install redis-server)")
    return RedisServer(folder, **options)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        path = str(tmp_path / "sequences.db")
        create_store(path, CONFIG).close()
        yield path
        return
    with redis_server(tmp_path) as server:
        create_store(server.url, CONFIG).close()
        yield server.url


@pytest.mark.parametrize("num_kills", [10, pytest.param(150, marks=[pytest.mark.slow])])
def test_a_writer_killed_at_any_instant_loses_nothing_acknowledged(url: str, tmp_path: Path, num_kills: int) -> None:
    result = finish(writer(url, tmp_path / "acks", 100_000, "kill", 20, num_kills, num_kills))
    assert result["num_kills"] == num_kills
    assert result["num_calls"] > num_kills / 2


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_killed_at_a_named_point_loses_nothing_acknowledged(tmp_path: Path, point: str) -> None:
    path = tmp_path / "sequences.db"
    create_store(path, CONFIG).close()
    result = finish(writer(path, tmp_path / "acks", 60, "point", point, 6))
    assert result["num_kills"] >= 3


@pytest.mark.parametrize("num_kills", [2, pytest.param(40, marks=[pytest.mark.slow])])
def test_a_redis_server_that_syncs_always_loses_nothing_acknowledged(tmp_path: Path, num_kills: int) -> None:
    acks = tmp_path / "acks"
    acks.touch()
    draw = random.Random(num_kills)
    with redis_server(tmp_path, appendfsync="always") as server:
        create_store(server.url, CONFIG).close()
        for _ in range(num_kills):
            before = acks.stat().st_size
            process = writer(server.url, acks, 100_000, "once")
            while acks.stat().st_size == before and process.poll() is None:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.2)
            server.kill()
            _, errors = process.communicate(timeout=60)
            assert "no Redis server answers" in errors and process.returncode != 0
            server.start()
            check_everything(server.url, acks)
        assert acks.stat().st_size > num_kills


def check_everything(url: str, acks: Path) -> None:
    sys.path.insert(0, str(HERE))
    import sequence_writer

    sequence_writer.check(url, acks, 1 << 30)


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        ("sequences:after-insert", 20),
        ("correction:after-note", 1),
        pytest.param("sequences:after-delete", 20, marks=[pytest.mark.slow]),
        pytest.param("sequences:before-commit", 2, marks=[pytest.mark.slow]),
        pytest.param("sequences:after-commit", 2, marks=[pytest.mark.slow]),
        pytest.param("correction:before-note", 1, marks=[pytest.mark.slow]),
    ],
)
def test_a_killed_correction_leaves_whole_users_and_goes_on(nursery: Nursery, point: str, occurrence: int) -> None:
    data = nursery.folder / "datasets" / "small"
    path = nursery.folder / f"{point.replace(':', '-')}.db"
    with create_store(path) as store:
        store.append(1 << 60, [{"item_id": 1, "action": "odd", "surface": "s", "time_ms": 1, "received_ms": 1}])
    command = ["sequences", "correct", str(path), "--data", str(data)]
    outcome = nursery.run(command, at=[point, occurrence], action="kill")
    assert outcome.code == KILLED, outcome.log
    dataset = open_dataset(data)
    with open_store(path) as store:
        report = compare(store, dataset)
        # Each user is as it was or as it should be: nobody has a part.
        assert report.num_changed_users > 0 or point == "correction:before-note"
        assert report.total("different") == 0
        done = set(store.user_ids().tolist()) - {1 << 60}
        counts = dataset.read_events(["user_id"])["user_id"].value_counts().to_pylist()
        num_events = {count["values"]: count["counts"] for count in counts}
        assert all(store.read(user).num_events == num_events[user] for user in done)
    outcome = nursery.run(command)
    assert outcome.code == 0, outcome.log
    with open_store(path) as store:
        assert compare(store, dataset).num_changed_users == 0
        assert store.stats()["num_events"] == dataset.num_events


FORGETTER = """
import os, signal, sys
from tackboard.core import files
from tackboard.events.sequence_store import open_store
def stand(point):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
store = open_store(sys.argv[1])
files.observer = stand
store.forget(1)
"""


@pytest.mark.parametrize("point", ["sequences:before-commit", "sequences:after-commit", "sequences:before-scrub"])
def test_a_killed_forget_leaves_all_or_nothing_and_can_be_called_again(tmp_path: Path, point: str) -> None:
    path = tmp_path / "sequences.db"
    with create_store(path, StoreConfig(fields={"query": "string"}, max_recent=7, chunk_events=10)) as store:
        for user in (1, 2):
            events = [
                {"item_id": n, "action": "a", "surface": "s", "time_ms": n, "query": f"secret-{user}"}
                for n in range(40)
            ]
            store.append(user, events)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORGETTER, str(path), point], env=environment)
    assert done.returncode == KILLED
    with open_store(path) as store:
        assert store.read(1).num_events == (40 if point == "sequences:before-commit" else 0)
        assert store.read(2).num_events == 40
        store.forget(1)
        assert b"secret-1" not in path.read_bytes() and b"secret-2" in path.read_bytes()
