from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from tackboard.core.errors import StorageError
from tackboard.events.sequence_store import scrubbing
from tackboard.events.sequence_store.scrubbing import zero_unallocated


def fill(path: Path, seed: int) -> sqlite3.Connection:
    """A database whose tree was balanced often, with secure_delete; of two thirds of the people nothing should stay."""
    draw = random.Random(seed)
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA page_size = 1024")
    database.execute("PRAGMA secure_delete = ON")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("CREATE TABLE a (person INTEGER, n INTEGER, text BLOB, PRIMARY KEY (person, n)) WITHOUT ROWID")
    for number in range(1500):
        person = draw.randrange(60)
        text = f"<{person:03d}>" + "x" * draw.choice([0, 5, 150])
        database.execute("INSERT INTO a VALUES (?, ?, ?)", (person, number, text.encode()))
        if number % 40 == 0:
            gone = draw.randrange(60)
            if gone % 3:
                database.execute("DELETE FROM a WHERE person = ?", (gone,))
    database.execute("DELETE FROM a WHERE person % 3")
    return database


def traces(path: Path) -> list[int]:
    content = path.read_bytes()
    return [person for person in range(60) if person % 3 and f"<{person:03d}>".encode() in content]


def test_nothing_stays_of_what_was_deleted_and_everything_of_the_rest(tmp_path: Path) -> None:
    num_traces = 0
    for seed in range(3):
        path = tmp_path / f"{seed}.db"
        database = fill(path, seed)
        rows = database.execute("SELECT * FROM a").fetchall()
        database.close()
        num_traces += len(traces(path))
        zero_unallocated(path, 1024)
        assert traces(path) == []
        assert zero_unallocated(path, 1024) == 0, "a second time there is nothing to do"
        database = sqlite3.connect(path)
        assert database.execute("SELECT * FROM a").fetchall() == rows
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
    assert num_traces, "SQLite alone would do; then this module can go"


def test_a_file_too_large_to_tell_its_pages_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "a.db", 1).close()
    monkeypatch.setattr(scrubbing, "MOST_PAGES", 3)
    with pytest.raises(StorageError, match="VACUUM"):
        zero_unallocated(tmp_path / "a.db", 1024)
