"""Flipped bits, swapped and lost blocks in a sequence store: an answer is right, or an error names the store.

Bits are flipped anywhere in an SQLite file, in the pages around the blocks too, and in every value and field that a
Redis server holds. `make test` flips a few hundred, `make test-slow` thousands.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.redis_server import RedisServer
from tackboard.cli import main as command_line
from tackboard.core.errors import CorruptFileError, DataError, StorageError, UsageError
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.opening import create_store, open_store

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
CONFIG = StoreConfig(fields={"query": "string", "dwell": "float"}, max_recent=7, chunk_events=10)
USERS = list(range(-3, 21))
DATA_INVALID = 3
Answers = dict[str, Any]


def fill(store: SequenceStore) -> None:
    """Chunks, buffers, late events, users with a buffer only, and two who are forgotten."""
    for number in range(6):
        for user in USERS:
            events = [
                {
                    "item_id": user * 1000 + n,
                    "action": f"action {n % 5}",
                    "surface": "home",
                    "time_ms": 10_000 + n * 10 - (137 if n % 4 == 0 else 0),
                    "received_ms": 10_000 + n * 10,
                    "query": f"words {n}" if n % 3 else None,
                    "dwell": n / 4,
                }
                for n in range(number * 6, number * 6 + (6 if user % 4 else 1))
            ]
            store.append(user, events)
    for user in (100, 101):
        store.append(user, [{"item_id": 1, "action": "action 0", "surface": "home", "time_ms": 1}])
        store.forget(user)


def answers(url: str) -> Answers:
    """All that a store says: who is there, and everything of everybody."""
    with open_store(url) as store:
        found: Answers = {"users": store.user_ids().tolist()}
        everything = store.read_many(USERS)
        found["lengths"] = everything.offsets.tolist()
        found.update({name: column.to_pylist() for name, column in everything.columns.items()})
        found["newest"] = store.read_many(USERS, ["item_id"], last=3).rows()
        found["forgotten"] = sorted(store.forgotten_ms([100, 101]))
    return found


def silent_or_found(url: str, where: str, right: Answers) -> str:
    """`same`, `found` where an error that names the store was raised, or what was served wrongly."""
    try:
        got = answers(url)
    except (DataError, StorageError, UsageError) as error:
        return "found" if where in str(error) else f"an error without the store: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told with the bit that made it.
        return f"a crash: {type(error).__name__}: {error}"
    wrong = [key for key in right if got.get(key) != right[key]]
    # Nobody reads the list of those forgotten as an answer; `verify` looks through it.
    wrong = [key for key in wrong if key != "forgotten"]
    return f"wrong: {wrong}" if wrong else "same"


def verify(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tackboard", "verify", url])
    with pytest.raises(SystemExit) as ended:
        command_line.run()
    return int(str(ended.value.code)), capsys.readouterr().err


# ---- a file ----


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bits") / "sequences.db"
    with create_store(path, CONFIG) as store:
        fill(store)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "everything is in the one file"
    return path


@pytest.mark.parametrize("num_bits", [80, pytest.param(1500, marks=[pytest.mark.slow])])
def test_no_flipped_bit_of_a_file_is_served(original: Path, tmp_path: Path, num_bits: int) -> None:
    right, content = answers(str(original)), original.read_bytes()
    draw = random.Random(num_bits)
    outcomes: dict[int, str] = {}
    for bit in draw.sample(range(8 * len(content)), num_bits):
        # A new name each time: nothing may be remembered from the one before.
        path = tmp_path / f"{bit}.db"
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        outcomes[bit] = silent_or_found(str(path), str(path), right)
        for file in tmp_path.glob(f"{bit}.db*"):
            file.unlink()
    silent = {bit: outcome for bit, outcome in outcomes.items() if outcome not in ("same", "found")}
    assert not silent, f"{len(silent)} of {num_bits} flipped bits: {list(silent.items())[:3]}"
    assert list(outcomes.values()).count("found") > num_bits / 4


def test_verify_finds_every_flipped_bit_that_matters(original: Path, tmp_path: Path) -> None:
    from tackboard.events.sequence_store.verification import verify_store

    right, content = answers(str(original)), original.read_bytes()
    draw = random.Random(7)
    num_found = 0
    for bit in draw.sample(range(8 * len(content)), 30):
        path = tmp_path / f"{bit}.db"
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            with open_store(path) as store:
                verify_store(store)
        except (DataError, StorageError) as error:
            assert str(path) in str(error)
            num_found += 1
        else:
            assert answers(str(path)) == right, f"bit {bit}: verify says intact"
    assert num_found > 7


def test_verify_names_the_place_and_exits_3(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sequences.db"
    shutil.copy(original, path)
    assert verify(str(path), monkeypatch, capsys) == (0, "")
    with open_store(path) as store:
        database = store._db  # type: ignore[attr-defined]
        (chunk,) = database.execute("SELECT max(chunk) FROM blocks WHERE user_id = 3").fetchone()
        change = "UPDATE blocks SET data = CAST(x'00' || data AS BLOB) WHERE user_id = 3 AND number = 0 AND chunk = ?"
        database.execute(change, (chunk,))
    code, message = verify(str(path), monkeypatch, capsys)
    assert code == DATA_INVALID
    assert f"{path}: column item_id of chunk {chunk} of user 3 is damaged" in message and len(message.splitlines()) <= 3


# ---- a server ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("NOT TESTED: the sequence store on Redis; there is no redis-server (apt-get install redis-server)")
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def url(server: RedisServer) -> str:
    found = f"{server.url}?prefix=bits{time.time_ns()}"
    with create_store(found, CONFIG) as store:
        fill(store)
    return found


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("num_bits", [60, pytest.param(1000, marks=[pytest.mark.slow])])
def test_no_flipped_bit_on_a_server_is_served(url: str, num_bits: int) -> None:
    right = answers(url)
    prefix = url.partition("prefix=")[2]
    draw = random.Random(num_bits)
    silent: list[str] = []
    with open_store(url) as store:
        client: Any = store._client  # type: ignore[attr-defined]
        keys = sorted(client.scan_iter(f"{prefix}:*"))
        assert all(client.type(key) == b"hash" for key in keys)
        for number in range(num_bits):
            key = draw.choice(keys)
            held = client.hgetall(key)
            field, value = draw.choice(sorted(held.items()))
            # Every fifth time the field: for a buffered event it is the event, for a name the name.
            is_field = number % 5 == 0 and field != b""
            client.hdel(key, field)
            other = flipped(field, draw) if is_field else field
            client.hset(key, other, value if is_field else flipped(value, draw))
            outcome = silent_or_found(url, prefix, right)
            # A count of 0 under another name is still 0, and who is forgotten is not missed by a read.
            if outcome != "found" and not (is_field and outcome == "same"):
                silent.append(f"{key!r} {field!r}: {outcome}")
            client.delete(key)
            client.hset(key, mapping=held)
    assert answers(url) == right
    assert not silent, f"{len(silent)} of {num_bits} flipped bits: {silent[:3]}"


def test_verify_reads_a_server(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(url, monkeypatch, capsys) == (0, "")
    with open_store(url) as store:
        client, keys = store._client, store._keys  # type: ignore[attr-defined]
        registry = client.hgetall(keys.of("registry"))
        client.hdel(keys.of("registry"), 5)
        code, message = verify(url, monkeypatch, capsys)
        assert code == DATA_INVALID and "the entry of user 5 in the list of users is missing" in message
        client.hset(keys.of("registry"), 5, registry[b"5"])
        client.delete(keys.user(4, "head"), keys.user(4, "recent"), keys.user(4, "columns"))
        code, message = verify(url, monkeypatch, capsys)
        assert code == DATA_INVALID and "the directory of user 4 is missing" in message


def test_a_damaged_block_is_not_appended_to(url: str) -> None:
    event = {"item_id": 1, "action": "action 0", "surface": "home", "time_ms": 10**6}
    with open_store(url) as store:
        client, keys = store._client, store._keys  # type: ignore[attr-defined]
        head = client.hget(keys.user(3, "head"), "directory")
        client.hset(keys.user(3, "head"), "directory", bytes([head[0] ^ 1]) + head[1:])
        with pytest.raises(CorruptFileError, match="the directory of user 3 is damaged"):
            store.append(3, [event])
        client.hset(keys.user(3, "head"), "directory", head)
        digest = store.digest(100)
        gone = client.hget(keys.of("gone"), digest)
        client.hset(keys.of("gone"), digest, bytes([gone[0] ^ 1]) + gone[1:])
        with pytest.raises(CorruptFileError, match="the list of forgotten users is damaged"):
            store.append(100, [event])
        count = client.hget(keys.of("words:action"), "")
        client.hset(keys.of("words:action"), "", bytes([count[0] ^ 1]) + count[1:])
        with pytest.raises(CorruptFileError, match="the list of actions is damaged"):
            store.append(3, [{**event, "action": "new"}])


# ---- both ----


def exchange_in_file(store: Any, table: str, value: str, one: str, other: str) -> None:
    select = f"SELECT {value} FROM {table} WHERE "
    held = [store._db.execute(select + where).fetchone()[0] for where in (one, other)]
    assert held[0] != held[1]
    for where, content in ((one, held[1]), (other, held[0])):
        store._db.execute(f"UPDATE {table} SET {value} = ? WHERE {where}", (content,))


@pytest.mark.parametrize(
    ("table", "value", "one", "other", "place"),
    [
        ("heads", "head", "user_id = 1", "user_id = 2", "the directory of user"),
        (
            "blocks",
            "data",
            "user_id = 1 AND number = 0 AND chunk = {c}",
            "user_id = 2 AND number = 0 AND chunk = {c}",
            "column",
        ),
        (
            "blocks",
            "data",
            "user_id = 1 AND number = 3 AND chunk = {c}",
            "user_id = 1 AND number = 4 AND chunk = {c}",
            "column",
        ),
        ("words", "code", "name = CAST('action 1' AS BLOB)", "name = CAST('action 2' AS BLOB)", "the list of actions"),
        ("settings", "value", "key = 'config'", "key = 'salt'", "the setting"),
    ],
)
def test_swapped_blocks_are_found(
    original: Path, tmp_path: Path, table: str, value: str, one: str, other: str, place: str
) -> None:
    path = tmp_path / "sequences.db"
    shutil.copy(original, path)
    with open_store(path) as store:
        (chunk,) = store._db.execute("SELECT max(chunk) FROM blocks WHERE user_id = 1").fetchone()  # type: ignore[attr-defined]
        exchange_in_file(store, table, value, one.format(c=chunk), other.format(c=chunk))
    with pytest.raises(CorruptFileError, match=f"{path}: {place}"):
        answers(str(path))


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("DELETE FROM heads WHERE user_id = 5", "the directory of user 5 is missing"),
        ("DELETE FROM heads WHERE user_id = 4", "the directory of user 4 is missing"),
        (
            "DELETE FROM buffer WHERE user_id = 4 AND time_ms = (SELECT max(time_ms) FROM buffer WHERE user_id = 4)",
            "the buffer of user 4",
        ),
        ("DELETE FROM blocks WHERE user_id = 5 AND number = 2", "column surface of chunk"),
        ("DELETE FROM words WHERE name = CAST('action 4' AS BLOB)", "the list of actions has lost a name"),
        ("DELETE FROM words WHERE name = CAST('' AS BLOB)", "the list of actions has lost a name"),
        ("DELETE FROM words", "the list of actions has lost a name"),
        ("DELETE FROM settings WHERE key = 'salt'", "has lost its settings"),
    ],
)
def test_a_lost_row_is_found(original: Path, tmp_path: Path, statement: str, place: str) -> None:
    path = tmp_path / "sequences.db"
    shutil.copy(original, path)
    with open_store(path) as store:
        assert store._db.execute(statement).rowcount > 0  # type: ignore[attr-defined]
    with pytest.raises(CorruptFileError, match=place):
        with open_store(path) as store:
            for user in USERS:
                store.read(user)
    with pytest.raises(CorruptFileError, match=place):
        answers(str(path))


# ---- a migration that is killed ----

MIGRATOR = """
import os, signal, sys
from tackboard.core import files
from tackboard.events.sequence_store.migration import migrate_store
left = int(sys.argv[3])
def stand(point):
    global left
    left -= point == sys.argv[2]
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
files.observer = stand
migrate_store(sys.argv[1])
"""


def migrate_and_die(url: str, point: str, occurrence: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", MIGRATOR, url, point, str(occurrence)], env=environment)
    assert done.returncode == -signal.SIGKILL


def contents(url: str) -> list[Any]:
    with open_store(url) as store:
        return [store.read(user).rows() for user in (1, 2)]


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [("migration:blocks", 20), ("sequences:before-commit", 1), ("sequences:after-commit", 1)],
)
def test_a_killed_migration_of_a_file_leaves_it_whole_and_is_done_again(
    tmp_path: Path, point: str, occurrence: int
) -> None:
    from tackboard.events.sequence_store.migration import migrate_store

    path = tmp_path / "sequences.db"
    shutil.copy(HERE.parent / "golden" / "sequences-v1.db", path)
    right = contents(str(path))
    migrate_and_die(str(path), point, occurrence)
    assert contents(str(path)) == right
    is_done = point == "sequences:after-commit"
    with open_store(path) as store:
        assert store.seals.has_seals == is_done
    report = migrate_store(path)
    assert (report is None) == is_done
    assert contents(str(path)) == right


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        ("migration:begun", 1),
        ("migration:gone", 1),
        ("migration:words", 1),
        ("migration:user", 1),
        ("migration:before-commit", 1),
    ],
)
def test_a_killed_migration_on_a_server_is_closed_until_it_has_gone_on(
    server: RedisServer, point: str, occurrence: int
) -> None:
    import redis
    from golden_redis import load_redis

    from tackboard.events.sequence_store.migration import migrate_store

    url = f"{server.url}?prefix=killed{time.time_ns()}"
    with redis.Redis.from_url(server.url) as client:
        load_redis(client, 1, url.partition("prefix=")[2])
    right = contents(url)
    migrate_and_die(url, point, occurrence)
    with pytest.raises(UsageError, match="continues where it stopped"):
        open_store(url)
    report = migrate_store(url)
    assert report is not None and (report.num_users, report.num_forgotten_users) == (2, 1)
    assert contents(url) == right and migrate_store(url) is None
