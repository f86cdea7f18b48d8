"""This embedded engine keeps a store in one SQLite file. `merging` explains a user's chunks and buffer.

    heads      user → head: numbers of events, and the list of chunks
    buffer     user, time, event → time received, arrival number; duplicates have equal keys
    blocks     user, column, chunk → bytes; a read of one column touches no other column
    words      actions and surfaces → their codes
    gone       salted digest of a user → when the user was forgotten
    settings   settings; notes on the progress of work that is done in steps

Every value has a seal, which is a checksum (see `sealing`). SQLite's own pages around the values have no seal, so a
damaged page may hide rows. Therefore it is an error if a user has rows but no head, and `check_engine` makes SQLite
check all pages. The tables of version 1 have other names. A process that still runs an older tackboard therefore stops
when its store is migrated, instead of writing values without seals.

Decided: SQLite runs with a write-ahead log and by default synchronous=FULL, so a commit is on disk before it is
acknowledged. There is one writer at a time, and other writers wait; readers never wait. secure_delete is on for every
connection, so that no free page holds deleted events. Before `forget` or `retain` returns, the write-ahead log is
emptied and unused bytes are set to zero.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tackboard.core.errors import CorruptFileError, DataError, StorageError, TackboardError, UsageError
from tackboard.core.files import fsync_path, reach, remove_leftovers, staging_directory
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.engine import Appended, ColumnRequest, Fetched, Update
from tackboard.events.sequence_store.interface import SequenceStore, visible
from tackboard.events.sequence_store.merging import Change, append_change, fits_buffer
from tackboard.events.sequence_store.scrubbing import zero_unallocated
from tackboard.events.sequence_store.sealing import (
    UNSEALED_VERSION,
    check_version,
    head_place,
    open_settings,
    seal_settings,
)
from tackboard.events.sequence_store.values import Columns, Integers, take

APPLICATION_ID = 0x54425351  # "TBSQ" marks an SQLite file as a sequence store.
PAGE_BYTES = 4096
BUSY_S = 30.0
"""Seconds that a writer waits for another writer before it gives up."""
POLL_S = 0.0005
"""Seconds between two attempts to get the lock from another writer."""
SYNCHRONOUS = {
    "full": "every write is synced to disk before it is acknowledged",
    "normal": "the newest writes may be lost when the machine loses power",
}
SCHEMA = """
CREATE TABLE settings (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE words (kind TEXT, name BLOB, code BLOB, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE gone (digest BLOB PRIMARY KEY, forgotten_ms BLOB) WITHOUT ROWID;
CREATE TABLE heads (user_id INTEGER PRIMARY KEY, head BLOB);
CREATE TABLE buffer (user_id INTEGER, time_ms INTEGER, event BLOB, value BLOB,
    PRIMARY KEY (user_id, time_ms, event)) WITHOUT ROWID;
CREATE TABLE blocks (user_id INTEGER, number INTEGER, chunk INTEGER, data BLOB,
    PRIMARY KEY (user_id, number, chunk)) WITHOUT ROWID;
"""
VERSION_1 = {
    "settings": "SELECT key, value FROM meta",
    "words": "SELECT kind, CAST(name AS BLOB) AS name, code FROM names",
    "gone": "SELECT digest, forgotten_ms FROM forgotten",
    "heads": "SELECT user_id, head FROM users",
    "buffer": "SELECT user_id, time_ms, event, received_ms || ':' || arrival AS value FROM recent",
    "blocks": "SELECT user_id, number, chunk, data FROM columns",
}
"""Maps each table to a query that computes its rows from the tables of version 1."""
_GET = {
    "gone": "SELECT forgotten_ms FROM gone WHERE digest = ?",
    "notes": "SELECT value FROM settings WHERE key = 'note:' || ?",
}
_ITEMS = {
    "gone": "SELECT digest, forgotten_ms FROM gone",
    "words:action": "SELECT name, code FROM words WHERE kind = 'action'",
    "words:surface": "SELECT name, code FROM words WHERE kind = 'surface'",
}
_PUT = {
    "gone": "INSERT OR REPLACE INTO gone VALUES (?, ?)",
    "notes": "INSERT OR REPLACE INTO settings VALUES ('note:' || ?, ?)",
    "words:action": "INSERT OR REPLACE INTO words VALUES ('action', ?, ?)",
    "words:surface": "INSERT OR REPLACE INTO words VALUES ('surface', ?, ?)",
}
_DELETE_NOTE = "DELETE FROM settings WHERE key = 'note:' || ?"
_ADD_RECENT = "INSERT OR IGNORE INTO buffer VALUES (?, ?, ?, ?)"
_PUT_HEAD = "INSERT OR REPLACE INTO heads VALUES (?, ?)"
_LOST_HEADS = """
WITH RECURSIVE owners(user_id) AS (SELECT min(user_id) FROM {table} UNION ALL
    SELECT (SELECT min(user_id) FROM {table} WHERE user_id > owners.user_id) FROM owners WHERE user_id IS NOT NULL)
SELECT user_id FROM owners WHERE user_id IS NOT NULL AND user_id NOT IN (SELECT user_id FROM heads)
"""
"""Finds users who have rows in a table but no head, without reading every row."""


def create_sqlite(path: Path, config: StoreConfig, *, page_bytes: int = PAGE_BYTES) -> None:
    """Makes an empty store at `path`, all or nothing. An existing file raises UsageError."""
    if path.exists():
        raise UsageError(f"{path} exists already", fix="open it, or choose another path")
    with staging_directory(path) as folder:
        remove_leftovers(path.parent, path.name)
        temporary = folder / path.name
        with explained(path), contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            connection.executescript(SCHEMA)
            settings = seal_settings(str(path), secrets.token_bytes(32), config.to_json())
            connection.executemany("INSERT INTO settings VALUES (?, ?)", settings.items())
            connection.execute("PRAGMA journal_mode = WAL")
        fsync_path(temporary)
        reach("sequences:before-create")
        try:
            # Unlike a rename, a link does not replace a file that another process has made meanwhile.
            os.link(temporary, path)
        except FileExistsError:
            raise UsageError(f"{path} exists already", fix="open it, or choose another path") from None
        fsync_path(path.parent)


class SqliteStore(SequenceStore):
    """A store in one file. Use `synchronous="normal"` only if lost events can be appended again after a power cut."""

    engine = "sqlite"
    users_per_update = 32

    def __init__(self, path: Path, *, synchronous: str = "full", busy_s: float = BUSY_S) -> None:
        if synchronous not in SYNCHRONOUS:
            raise UsageError(f"synchronous is {synchronous!r}", allowed=f"allowed: {', '.join(SYNCHRONOUS)}")
        self.path, self.url, self.synchronous, self.busy_s = path, str(path), synchronous, busy_s
        self._db = _connect(path, synchronous, busy_s)
        try:
            with explained(path):
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                rows = self._db.execute("SELECT key, value FROM settings WHERE key IN ('config', 'salt')").fetchall()
            seals, config = open_settings(self.url, version, dict(rows))
            super().__init__(StoreConfig.from_json(config), seals)
        except BaseException:
            self._db.close()
            raise
        self._numbers = {name: number for number, name in enumerate(self.config.columns)}

    def close(self) -> None:
        self._db.close()

    def durability(self) -> str:
        return f"SQLite, write-ahead log, synchronous={self.synchronous}: {SYNCHRONOUS[self.synchronous]}"

    def user_ids(self) -> Integers:
        with self._reading():
            users = [user for user, _ in self._heads()]
            self._check_owners()
        return np.array(users, np.int64)

    def _heads(self) -> Iterator[tuple[int, Head]]:
        for user, value in self._db.execute("SELECT user_id, head FROM heads ORDER BY user_id"):
            yield user, self.seals.open_head(user, value)

    def _num_bytes(self) -> int:
        files = [self.path.with_name(self.path.name + suffix) for suffix in ("", "-wal")]
        return sum(path.stat().st_size for path in files if path.exists())

    def _check_users(self) -> None:
        """Makes SQLite check its own pages, and then checks that every user has a head."""
        problems = [text for (text,) in self._db.execute("PRAGMA integrity_check(10)")]
        if problems != ["ok"]:
            raise self.seals.damaged("SQLite", f"finds: {problems[0]}")
        self._check_owners()

    def _check_owners(self) -> None:
        for table in ("buffer", "blocks"):
            row = self._db.execute(_LOST_HEADS.format(table=table)).fetchone()
            if row is not None:
                raise self.seals.damaged(head_place(row[0]), "is missing")

    def _get(self, table: str, keys: Sequence[Any]) -> list[bytes | None]:
        with explained(self.path):
            rows = [self._db.execute(_GET[table], (key,)).fetchone() for key in keys]
        return [None if row is None else row[0] for row in rows]

    def forgotten_ms(self, user_ids: Sequence[int]) -> dict[int, int]:
        # Most stores have no forgotten users, and then appending is quicker without a query for each user.
        with explained(self.path):
            is_empty = self._db.execute("SELECT 1 FROM gone LIMIT 1").fetchone() is None
        return {} if is_empty else super().forgotten_ms(user_ids)

    def _items(self, table: str) -> dict[bytes, bytes]:
        with explained(self.path):
            return dict(self._db.execute(_ITEMS[table]).fetchall())

    def _fetch(self, user_ids: Sequence[int]) -> list[Fetched]:
        return [Fetched(None, head, self._recent(user, head)) for user in user_ids for head in [self._head(user)]]

    def _head(self, user_id: int) -> Head:
        row = self._db.execute("SELECT head FROM heads WHERE user_id = ?", (user_id,)).fetchone()
        if row is not None:
            return self.seals.open_head(user_id, row[0])
        for table in ("buffer", "blocks"):
            if self._db.execute(f"SELECT 1 FROM {table} WHERE user_id = ? LIMIT 1", (user_id,)).fetchone():
                raise self.seals.damaged(head_place(user_id), "is missing")
        return Head()

    def _recent(self, user_id: int, head: Head) -> list[Any]:
        query = "SELECT time_ms, event, value FROM buffer WHERE user_id = ?"
        return self._db.execute(query, (user_id,)).fetchall() if head.num_recent else []

    def _fetch_columns(self, requests: Sequence[ColumnRequest]) -> list[tuple[bytes | None, list[bytes | None]]]:
        query = "SELECT chunk, data FROM blocks WHERE user_id = ? AND number = ? AND chunk BETWEEN ? AND ?"
        answers: list[tuple[bytes | None, list[bytes | None]]] = []
        for user, names, chunks in requests:
            blobs: list[bytes | None] = []
            for name in names:
                found = dict(self._db.execute(query, (user, self._numbers[name], chunks[0], chunks[-1])))
                blobs += [found.get(chunk) for chunk in chunks]
            answers.append((None, blobs))
        return answers

    def _update(self, decide: Callable[[], Update], *, tables: Sequence[str] = (), users: Sequence[int] = ()) -> None:
        with self._writing():
            update = decide()
            for user, change in update.users.items():
                self._apply(user, change)
            for table, entries in update.entries.items():
                for key, value in entries.items():
                    statement, row = (_DELETE_NOTE, (key,)) if value is None else (_PUT[table], (key, value))
                    self._db.execute(statement, row)

    def _append(self, users: list[tuple[int, Integers]], columns: Columns, packed: list[bytes]) -> Appended:
        times, received = columns["time_ms"].values.tolist(), columns["received_ms"].values.tolist()
        num_forgotten = num_duplicates = 0
        with self._writing():
            forgotten = self.forgotten_ms([user for user, _ in users])
            for user, places in users:
                kept, num_refused = visible(columns, places, forgotten.get(user))
                num_forgotten += num_refused
                if not len(kept):
                    continue
                head = self._head(user)
                moments = columns["time_ms"].values[kept]
                if not fits_buffer(head, self._loader(user, None), moments, self.config):
                    new = take(columns, kept)
                    change, num_doubles = append_change(self._state(user), new, self.config, self.codec)
                    num_duplicates += num_doubles
                    if change is not None:
                        self._apply(user, change)
                    continue
                # Duplicates have equal keys in the table `buffer`, and the statement ignores rows with an existing key.
                rows = [
                    (user, *self.seals.seal_recent(user, (times[p], packed[p], received[p], head.next_arrival + n)))
                    for n, p in enumerate(kept.tolist())
                ]
                num_added = self._db.executemany(_ADD_RECENT, rows).rowcount
                num_duplicates += len(rows) - num_added
                if num_added:
                    num_late = head.num_late + int((moments < head.chunked_until_ms).sum())
                    next_arrival = head.next_arrival + len(rows)
                    changed = Head(head.num_recent + num_added, num_late, next_arrival, head.next_chunk, head.chunks)
                    self._db.execute(_PUT_HEAD, (user, self.seals.seal_head(user, changed)))
        return Appended(len(times) - num_duplicates - num_forgotten, num_duplicates, num_forgotten)

    def _scrub(self) -> None:
        """Removes deleted events from the write-ahead log and from unused bytes of the file."""
        self.seals.check_writable()
        deadline = time.monotonic() + self.busy_s
        wal = self.path.with_name(self.path.name + "-wal")
        with explained(self.path):
            while True:
                busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    self._lock()
                    try:
                        # If no process wrote between the checkpoint and the lock, the file alone holds all data.
                        if not wal.exists() or wal.stat().st_size == 0:
                            (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
                            reach("sequences:before-scrub")
                            zero_unallocated(self.path, page_bytes)
                            scrubbed = self.seals.seal_setting("scrubbed", str(time.time_ns()).encode())
                            self._db.execute("INSERT OR REPLACE INTO settings VALUES ('scrubbed', ?)", (scrubbed,))
                            self._db.execute("COMMIT")
                            break
                    finally:
                        if self._db.in_transaction:
                            self._db.execute("ROLLBACK")
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"deleted events are still in {wal}: another process reads or writes without a pause",
                        fix="run the command again when that process is done",
                    )
                time.sleep(POLL_S)
        # Like every other connection, this connection must drop the pages that it holds in memory.
        self._db.close()
        self._db = _connect(self.path, self.synchronous, self.busy_s)

    def _apply(self, user_id: int, change: Change) -> None:
        if change.clear_recent:
            self._db.execute("DELETE FROM buffer WHERE user_id = ?", (user_id,))
        reach("sequences:after-delete")
        if change.is_empty:
            self._db.execute("DELETE FROM blocks WHERE user_id = ?", (user_id,))
            self._db.execute("DELETE FROM heads WHERE user_id = ?", (user_id,))
            return
        numbers = self._numbers.values()
        self._db.executemany(
            "DELETE FROM blocks WHERE user_id = ? AND number = ? AND chunk = ?",
            [(user_id, number, chunk) for chunk in change.drop_chunks for number in numbers],
        )
        recent = [(user_id, *self.seals.seal_recent(user_id, row)) for row in change.add_recent]
        self._db.executemany(_ADD_RECENT, recent)
        blocks = [
            (user_id, self._numbers[name], chunk, self.seals.seal_column(user_id, name, chunk, data))
            for (name, chunk), data in change.put.items()
        ]
        self._db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", blocks)
        reach("sequences:after-insert")
        self._db.execute(_PUT_HEAD, (user_id, self.seals.seal_head(user_id, change.head)))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Wraps reads in one transaction, because a writer may move the buffer into a chunk between two statements."""
        with explained(self.path):
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Wraps writes in a transaction that takes the lock at once and is committed when the block ends."""
        self.seals.check_writable()
        with self.rewriting():
            yield

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[sqlite3.Connection]:
        """Does the same as `_writing`, but for a store of any version; yields the connection."""
        with explained(self.path):
            self._lock()
            try:
                yield self._db
                reach("sequences:before-commit")
                self._db.execute("COMMIT")
                reach("sequences:after-commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _lock(self) -> None:
        """Begins a transaction that may write, as soon as no other transaction writes.

        SQLite itself would try to get the lock less and less often, in the end ten times a second. This would rarely
        succeed while another process writes one transaction after another.
        """
        deadline = time.monotonic() + self.busy_s
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    self._db.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    # Only the lower byte is compared: the upper bytes say in which way the file is busy.
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                        raise
                time.sleep(POLL_S)
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(self.busy_s * 1000)}")


def _connect(path: Path, synchronous: str, busy_s: float) -> sqlite3.Connection:
    if not path.is_file():
        raise UsageError(
            f"{path} is not a file" if path.exists() else f"{path} does not exist",
            allowed="allowed: a sequence store",
            fix=f"make one with `tackboard sequences append {path} FILE`",
        )
    with explained(path):
        # With this URI no file is created; a plain path with a misspelt name would create an empty file.
        uri = f"file:{path.resolve().as_posix().replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=busy_s)
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION_ID:
                raise DataError(
                    f"{path} is an SQLite file, but not a sequence store", allowed="allowed: a sequence store"
                )
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            check_version(str(path), version)
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA cache_size = -16384")
            if version == UNSEALED_VERSION:
                for table, query in VERSION_1.items():
                    connection.execute(f"CREATE TEMP VIEW {table} AS {query}")
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into Tackboard errors."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, error) from error
    except UnicodeDecodeError as error:
        # The sqlite3 module reads the names of tables as text, so this error means that the name of a table is damaged.
        raise CorruptFileError(f"{path} is damaged: {error}", fix="restore it, or make a new one") from error


def _explain(path: Path, error: sqlite3.Error) -> TackboardError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_NOTADB"):
        return DataError(f"{path} is not a sequence store: {error}", allowed="allowed: a sequence store")
    if name.startswith("SQLITE_CORRUPT"):
        return CorruptFileError(f"{path} is damaged: {error}", fix="restore it, or make a new one")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StorageError(f"{path} was locked for too long by another writer", fix="run the command again")
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StorageError(
            f"{path}: {error}", fix="check the free space on the disk, and the permissions of the file and its folder"
        )
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return TackboardError(f"{path}: {type(error).__name__}: {error}")
    # Our statements are always the same. If SQLite cannot parse a statement, the file's list of tables is damaged.
    return CorruptFileError(f"{path} is damaged: {error}", fix="restore it, or make a new one")
