from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.hashing import string_id
from tackboard.events.sequence_store import open_store

LOG = "user,item,time,action,dwell\nann,7,1714557600,click,1.5\nbob,8,1714557601,save,\nann,8,1714557500,click,2\n"
LINE = '{"user": "ann", "item": 9, "action": "hide", "surface": "home", "time_ms": 1714557700000}\n'
OPTIONS = ("--action", "action", "--field", "dwell")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_a_log_makes_a_store_and_again_changes_nothing(
    tackboard: Callable[..., Any], log: Path, tmp_path: Path
) -> None:
    store = tmp_path / "s.db"
    answer = tackboard("sequences", "append", store, log, *OPTIONS)
    assert answer.code == 0, answer.err
    assert f"{store} (made)" in answer.out
    again = tackboard("sequences", "append", store, log, *OPTIONS, "--json").json()
    assert (again["num_events"], again["num_duplicates"], again["is_new"]) == (0, 3, False)
    assert again["report"]["out_of_order"] == 1
    with open_store(store) as opened:
        assert opened.config.fields == {"dwell": "float"}
        found = opened.read(string_id("ann"), ["item_id", "dwell"]).rows()
    assert found == [{"item_id": 8, "dwell": 2.0}, {"item_id": 7, "dwell": 1.5}]


def test_json_lines_from_a_file_and_from_standard_input(
    tackboard: Callable[..., Any], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lines = tmp_path / "s.db", tmp_path / "events.jsonl"
    tackboard("sequences", "append", store, log, *OPTIONS)
    lines.write_text(LINE)
    assert tackboard("sequences", "append", store, lines, "--json").json()["num_events"] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(LINE + LINE.replace("hide", "save")))
    answer = tackboard("sequences", "append", store, "-", "--json").json()
    assert (answer["num_events"], answer["num_duplicates"]) == (1, 1)
    tackboard("data", "forget", "--user", "ann", "--store", store)
    lines.write_text(LINE.replace("}", ', "received_ms": 5}'))
    assert "received before their user was forgotten" in tackboard("sequences", "append", store, lines).out


def test_mistakes(tackboard: Callable[..., Any], log: Path, tmp_path: Path) -> None:
    store, lines = tmp_path / "s.db", tmp_path / "events.jsonl"
    lines.write_text("nonsense\n")
    for arguments, code, says in (
        ((store, lines), 2, "sequences create"),
        ((store, tmp_path / "no.jsonl"), 2, "does not exist"),
        ((store, tmp_path / "no.csv"), 2, "does not exist"),
        ((store, log, "--item", "itm"), 3, "did you mean --item item"),
        ((log, log), 3, "no sequence store"),
        (("mysql://a/b", log), 2, "redis://host:port/db"),
    ):
        answer = tackboard("sequences", "append", *arguments)
        assert answer.code == code and says in answer.err and len(answer.err.splitlines()) <= 3, answer
    assert not store.exists()
    tackboard("sequences", "append", store, log)
    answer = tackboard("sequences", "append", store, lines)
    assert answer.code == 3 and "events.jsonl line 1 is not JSON" in answer.err
