from __future__ import annotations

import json
from pathlib import Path

import pytest

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.events.importer import ImportConfig
from tackboard.events.sequence_store import event_files
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.engine import Appended
from tackboard.events.sequence_store.event_files import append_json_lines, append_table, config_of, read_log
from tackboard.events.sequence_store.opening import create_store

LOG = """\
user,item,time,action,request,position,dwell,paid
ann,7,1714557600,click,r1,0,1.5,true
bob,8,1714557601,save,r2,,,false
ann,8,1714557500,click,r1,1,2,true
"""


def config(file: Path) -> ImportConfig:
    fields = {"dwell": "dwell", "is_paid": "paid"}
    return ImportConfig(
        files=[file], user="user", item="item", time="time", action="action", request="request", position="position",
        fields=fields,
    )  # fmt: skip


def test_a_log_makes_a_store_that_can_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "EVENTS_PER_CALL", 2)
    (tmp_path / "log.csv").write_text(LOG)
    table, report = read_log(config(tmp_path / "log.csv"))
    assert report.rows_kept == 3
    settings = config_of(table)
    assert settings.fields == {"dwell": "float", "is_paid": "bool", "request": "string", "position": "int"}
    with create_store(tmp_path / "s.db", settings) as store:
        assert append_table(store, table) == Appended(3)
        assert append_table(store, table) == Appended(0, 3)
        found = store.read(string_id("ann"), ["item_id", "time_ms", "request", "position", "dwell"]).rows()
    assert found == [
        {"item_id": 8, "time_ms": 1714557500000, "request": "r1", "position": 1, "dwell": 2.0},
        {"item_id": 7, "time_ms": 1714557600000, "request": "r1", "position": 0, "dwell": 1.5},
    ]
    assert config_of(table, max_events=5).max_events == 5


def line(**values: object) -> str:
    return json.dumps({"user": "ann", "item": 3, "action": "click", "surface": "home", "time_ms": 5, **values})


def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "LINES_PER_CALL", 2)
    with create_store(tmp_path / "s.db", StoreConfig(fields={"dwell": "float"})) as store:
        lines = [line(), line(user=42, dwell=1.5), line(time_ms=4, item="x"), line(received_ms=9)]
        assert append_json_lines(store, lines, "events.jsonl") == Appended(3, 1)
        assert store.read(42, ["dwell"]).rows() == [{"dwell": 1.5}]
        found = store.read(string_id("ann"), ["item_id"]).columns["item_id"].values.tolist()
        assert found == [string_id("x"), 3]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "e.jsonl is empty"),
        (["{"], "e.jsonl line 1 is not JSON"),
        ([line(), "[]"], "line 2 is JSON, but not an object"),
        ([line(user=None)], "line 1 has no valid user"),
        ([line(item=1.5)], "line 1 has no valid item"),
        ([line(), line(), line(time_ms="now")], "among lines 1 to 3: event 2 has time_ms"),
        ([line(price=1)], "has a field 'price'"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: list[str], says: str) -> None:
    with create_store(tmp_path / "s.db") as store:
        with pytest.raises(DataError, match=says) as caught:
            append_json_lines(store, lines, "e.jsonl")
        assert "ann" not in str(caught.value)
        assert len(store.user_ids()) == 0
