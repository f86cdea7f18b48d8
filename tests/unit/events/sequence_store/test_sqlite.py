from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sequence_model import SMALL, event

from tackboard.core.errors import CorruptFileError, DataError, StorageError, UsageError
from tackboard.events.sequence_store.codec import FORMAT_VERSION
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.sqlite import SqliteStore, create_sqlite

ROOT = Path(__file__).resolve().parents[4]
WRITER = """
import sys
from pathlib import Path
from tackboard.events.sequence_store.sqlite import SqliteStore
store, number = SqliteStore(Path(sys.argv[1])), int(sys.argv[2])
for n in range(80):
    event = {"item_id": number, "action": f"a{number}", "surface": "s", "time_ms": n * 3 + number, "received_ms": n}
    answer = store.append_many([1, 10 + number], [event, event])
    assert answer.num_events == 2, answer
    found = store.read(1, ["item_id", "time_ms"]).columns
    mine = found["time_ms"].values[found["item_id"].values == number].tolist()
    assert mine == [m * 3 + number for m in range(n + 1)], mine
"""

BUSY_WRITER = """
import sys
from pathlib import Path
from tackboard.events.sequence_store.sqlite import SqliteStore
store, number = SqliteStore(Path(sys.argv[1]), synchronous="normal"), 0
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    number += 1
    users = [100 + number * step % 50 for step in range(1, 6)]
    store.append_many(users, [
        {"item_id": 1, "action": "a", "surface": "s", "time_ms": number * 10 + n, "query": "y" * (number * n % 90)}
        for n in range(5)
    ])
    assert store.read(users[0], last=1).columns["time_ms"].values[0] >= number * 10
print(number)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "a folder" / "sequences?#%20.db"
    create_sqlite(found, SMALL)
    return found


def test_a_new_store_leaves_nothing_beside_it(path: Path) -> None:
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(UsageError, match="exists already"):
        create_sqlite(path, SMALL)


@pytest.mark.parametrize("content", [b"", b"user,item\n1,2\n", bytes(5000)])
def test_a_file_that_is_no_store(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a sequence store"):
        SqliteStore(file)
    assert file.read_bytes() == content


def test_what_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        SqliteStore(tmp_path / "nothing.db")
    with pytest.raises(UsageError, match="is not a file"):
        SqliteStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_database_and_a_newer_store_are_refused(path: Path, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE a (b)")
    other.close()
    with pytest.raises(DataError, match="is an SQLite file, but not a sequence store"):
        SqliteStore(tmp_path / "other.db")
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    newer.close()
    with pytest.raises(DataError, match=f"allowed: up to {FORMAT_VERSION}"):
        SqliteStore(path)


def test_a_damaged_store_says_so(path: Path) -> None:
    with SqliteStore(path) as store:
        store.append(1, [event(n, n) for n in range(40)])
        store._db.execute("UPDATE blocks SET data = x'00'")
        with pytest.raises(CorruptFileError, match="is damaged"):
            store.read(1)
        store._db.execute("DELETE FROM blocks")
        with pytest.raises(CorruptFileError, match="is missing"):
            store.read(1)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="is damaged"):
        SqliteStore(path)


def test_durability_is_a_setting(path: Path) -> None:
    for word, number in (("full", 2), ("normal", 1)):
        with SqliteStore(path, synchronous=word) as store:
            assert store._db.execute("PRAGMA synchronous").fetchone() == (number,)
            assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert f"synchronous={word}" in store.durability()


def test_a_call_is_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteStore(path) as store:
        store.append(1, [event(0)])

        def fail(point: str) -> None:
            if point == "sequences:before-commit":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("tackboard.core.files.observer", fail)
        with pytest.raises(OSError, match="No space"):
            store.append_many([1, 2, 2], [event(1), event(1), event(2)])
        monkeypatch.undo()
        assert store.user_ids().tolist() == [1] and store.read(1).num_events == 1
        assert store.append_many([1, 2, 2], [event(1), event(1), event(2)]).num_events == 3


def test_a_writer_waits_for_another_and_then_says_who_is_in_the_way(path: Path) -> None:
    with SqliteStore(path) as holder, SqliteStore(path, busy_s=0.05) as waiter:
        waiter.append(1, [event(1)])
        holder._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="locked for too long"):
            waiter.append(1, [event(2)])
        assert waiter.read(1).num_events == 1, "readers never wait"
        holder._db.execute("ROLLBACK")
        assert waiter.append(1, [event(2)]).num_events == 1


def test_bytes_of_other_columns_are_not_fetched(path: Path) -> None:
    with SqliteStore(path) as store:
        store.append(1, [event(n, n, query=f"words {n}") for n in range(50)])
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        store.read(1, ["item_id", "query"], last=20)
    read = [line for line in statements if "FROM blocks" in line]
    numbers = {list(SMALL.columns).index(name) for name in ("item_id", "query")}
    assert {int(line.split("number = ")[1].split()[0]) for line in read} == numbers


def test_nothing_of_a_forgotten_user_is_left_in_the_files(path: Path) -> None:
    with SqliteStore(path) as store:
        for start in range(0, 60, 4):
            owners = [user for user in range(30) for _ in range(4)]
            words = [n for _ in range(30) for n in range(start, start + 4)]
            queries = [f"secret-{user:03d}-{n:03d}" for user, n in zip(owners, words, strict=True)]
            store.append_many(
                owners, [event(n * 7 % 60, n, query=query) for n, query in zip(words, queries, strict=True)]
            )
        for user in range(0, 30, 3):
            assert store.forget(user) == 50
            wal = path.with_name(path.name + "-wal")
            assert not wal.exists() or wal.stat().st_size == 0
            content = path.read_bytes()
            assert f"secret-{user:03d}".encode() not in content
        assert b"secret-001-0" in content, "the search would find one"
        assert store.user_ids().tolist() == [user for user in range(30) if user % 3]
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_forgetting_while_another_process_writes_without_a_pause(path: Path, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with SqliteStore(path) as store:
        for user in range(40):
            store.append(user, [event(n, n, query=f"secret-{user:03d}" + "z" * (n * 7 % 60)) for n in range(20)])
        command = [sys.executable, "-c", BUSY_WRITER, str(path), str(stop)]
        environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            for user in range(0, 40, 2):
                store.forget(user)
            stop.touch()
            assert int(writer.stdout.read()) > 5
        assert writer.returncode == 0
        # The writer held pages in memory all the time, and must not have written old bytes back.
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        content = path.read_bytes()
        assert [user for user in range(40) if f"secret-{user:03d}".encode() in content] == list(range(1, 40, 2))
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_retention_and_the_cap_drop_is_gone_from_the_files(path: Path) -> None:
    day = 24 * 3600 * 1000
    with SqliteStore(path) as store:
        for user in range(20):
            store.append(user, [event(n * day, n, query=f"secret-{n:03d}") for n in range(40)])
        store.retain(20, now=40 * day)
        content = path.read_bytes()
    assert b"secret-019" not in content and b"secret-020" in content


def test_forgetting_waits_for_a_reader_and_says_so_where_it_cannot(path: Path) -> None:
    with SqliteStore(path) as reader, SqliteStore(path, busy_s=0.05) as store:
        store.append(1, [event(1)])
        reader._db.execute("BEGIN")
        reader._db.execute("SELECT * FROM heads").fetchall()
        with pytest.raises(StorageError, match="another process reads or writes without a pause"):
            store.forget(1)
        reader._db.execute("ROLLBACK")
        assert store.read(1).num_events == 0
        store.forget(1)


def test_several_processes_write_and_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    create_sqlite(path, StoreConfig(max_recent=7, chunk_events=10))
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)], env=environment) for number in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    with SqliteStore(path) as store:
        times = store.read(1, ["time_ms"]).columns["time_ms"].values.tolist()
        assert times == list(range(240))
        for number in range(3):
            found = store.read(10 + number, ["action", "time_ms"])
            assert found.columns["action"].to_pylist() == [f"a{number}"] * 80
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_writers_get_their_turn_while_many_users_are_edited(path: Path) -> None:
    with SqliteStore(path) as store:
        users = [user for user in range(160) for _ in range(20)]
        store.append_many(users, [event(n, n) for _ in range(160) for n in range(20)])
    done = threading.Event()

    def retain() -> None:
        with SqliteStore(path) as other:
            other.retain(1e-9, now=15)
        done.set()

    thread = threading.Thread(target=retain)
    thread.start()
    num_appended = 0
    with SqliteStore(path) as store:
        while not done.is_set():
            store.append(1000, [event(100 + num_appended)])
            num_appended += 1
        thread.join()
        assert num_appended > 3
        assert store.read(7, ["time_ms"]).columns["time_ms"].values.tolist() == [15, 16, 17, 18, 19]
        assert store.read(1000).num_events == min(50, num_appended)
