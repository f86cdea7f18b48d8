"""`tackboard sequences …`: what each command does to a store, and what it prints."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.cli.sequences import without_password
from tackboard.core.hashing import string_id
from tackboard.events.sequence_store import StoreConfig, create_store, open_store

Program = Callable[..., Any]
GOLDEN = Path(__file__).resolve().parents[2] / "golden"
LOG = "user,item,time,action,dwell\nann,7,1714557600,click,1.5\nbob,8,1714557601,save,\nann,8,1714557500,click,2\n"
LINE = '{"user": "ann", "item": 9, "action": "hide", "surface": "home", "time_ms": 1714557700000}\n'
OPTIONS = ("--action", "action", "--field", "dwell")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test makes its store."""
    return tmp_path / "s.db"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log.csv").write_text(LOG)
    return tmp_path / "log.csv"


def event(number: int, **more: Any) -> dict[str, Any]:
    return {"item_id": number, "action": "click", "surface": "home", "time_ms": number * 1000} | more


def test_create_declares_fields(tackboard: Program, path: Path) -> None:
    for wrong in ("dwell", "dwell=double"):
        answer = tackboard("sequences", "create", path, "--field", wrong)
        assert answer.code == 2 and len(answer.err.splitlines()) <= 3 and not path.exists()
    answer = tackboard("sequences", "create", path, "--field", "dwell=float", "--field", "request=string")
    assert answer.code == 0, answer.err
    with open_store(path) as store:
        assert store.config.fields == {"dwell": "float", "request": "string"} and store.config.max_events == 16_000
    again = tackboard("sequences", "create", path)
    assert again.code == 2 and "exists already" in again.err


def test_append_makes_a_store_of_a_log_and_again_changes_nothing(tackboard: Program, log: Path, path: Path) -> None:
    answer = tackboard("sequences", "append", path, log, *OPTIONS)
    assert answer.code == 0, answer.err
    assert f"{path} (made)" in answer.out
    again = tackboard("sequences", "append", path, log, *OPTIONS, "--json").json()
    assert (again["num_events"], again["num_duplicates"], again["is_new"]) == (0, 3, False)
    assert again["report"]["out_of_order"] == 1
    with open_store(path) as opened:
        assert opened.config.fields == {"dwell": "float"}
        found = opened.read(string_id("ann"), ["item_id", "dwell"]).rows()
    assert found == [{"item_id": 8, "dwell": 2.0}, {"item_id": 7, "dwell": 1.5}]


def test_append_reads_json_lines_from_a_file_and_from_standard_input(
    tackboard: Program, log: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "events.jsonl"
    lines.write_text(LINE)
    for file, says in ((lines, "sequences create"), (tmp_path / "no.jsonl", "does not exist")):
        answer = tackboard("sequences", "append", path, file)
        assert answer.code == 2 and says in answer.err and not path.exists()
    tackboard("sequences", "append", path, log, *OPTIONS)
    assert tackboard("sequences", "append", path, lines, "--json").json()["num_events"] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(LINE + LINE.replace("hide", "save")))
    answer = tackboard("sequences", "append", path, "-", "--json").json()
    assert (answer["num_events"], answer["num_duplicates"]) == (1, 1)
    tackboard("data", "forget", "--user", "ann", "--store", path)
    lines.write_text(LINE.replace("}", ', "received_ms": 5}'))
    assert "received before their user was forgotten" in tackboard("sequences", "append", path, lines).out


def test_read_shows_a_user_by_number_or_name(tackboard: Program, path: Path) -> None:
    with create_store(path, StoreConfig(fields={"dwell": "float"})) as opened:
        for user_id in (42, string_id("ann")):
            opened.append(user_id, [event(number, received_ms=9000 - number) for number in range(10)])
    for options, items in (
        ((), list(range(10))),
        (("--last", "2"), [8, 9]),
        (("--since", "3000", "--until", "5000"), [3, 4]),
        (("--since", "1970-01-01T00:00:07Z"), [7, 8, 9]),
        (("--since", "1970-01-01T00:00:08"), [8, 9]),
        (("--received-before", "8993"), [8, 9]),
    ):
        for user in ("42", "ann"):
            answer = tackboard("sequences", "read", path, "--user", user, "--fields", "item_id", "--json", *options)
            assert answer.json() == {"num_events": len(items), "columns": {"item_id": items}}
    answer = tackboard("sequences", "read", path, "--user", "ann", "--last", "1")
    assert [line.split() for line in answer.out.splitlines()] == [
        ["item_id", "action", "surface", "time_ms", "received_ms", "dwell"],
        ["9", "click", "home", "9000", "8991"],
    ]
    wrong = tackboard("sequences", "read", path, "--user", "ann", "--since", "yesterday")
    assert wrong.code == 2 and "--since 'yesterday'" in wrong.err and "ann" not in wrong.err


def test_correct_compares_and_then_corrects(tackboard: Program, path: Path, tiny_dataset: Path) -> None:
    with create_store(path) as opened:
        opened.append(1, [event(1, action="odd", time_ms=1, received_ms=1)])
    compared = tackboard("sequences", "correct", path, "--data", tiny_dataset, "--compare", "--json").json()
    assert compared["is_changed"] is False
    assert compared["actions"]["odd"] == {"missing": 0, "extra": 1, "different": 0}
    with open_store(path) as opened:
        assert opened.user_ids().tolist() == [1]
    answer = tackboard("sequences", "correct", path, "--data", tiny_dataset)
    assert answer.code == 0, answer.err
    assert f"{compared['num_changed_users']} of {compared['num_users']} users were corrected" in answer.out
    assert ["odd", "0", "1", "0"] in [line.split() for line in answer.out.splitlines()]
    again = tackboard("sequences", "correct", path, "--data", tiny_dataset, "--compare")
    assert again.out.startswith("0 of ") and len(again.out.splitlines()) == 1


def test_stats_show_counts_settings_and_durability(tackboard: Program, path: Path) -> None:
    with create_store(path, StoreConfig(fields={"dwell": "float"})) as store:
        store.append_many([1, 2, 2], [event(1, time_ms=n, received_ms=n) for n in range(3)])
        store.forget(1)
    found = tackboard("sequences", "stats", path, "--json").json()
    assert (found["num_users"], found["num_events"], found["num_forgotten_users"]) == (1, 2, 1)
    assert found["settings"]["max_events"] == 16_000 and found["num_bytes"] > 4096
    lines = [" ".join(line.split()) for line in tackboard("sequences", "stats", path).out.splitlines()]
    assert "fields dwell (float)" in lines and "max_events 16,000" in lines
    assert any("synchronous=full" in line for line in lines)


def test_retain_deletes_old_events(tackboard: Program, path: Path) -> None:
    now = time.time_ns() // 1_000_000
    with create_store(path) as store:
        store.append(1, [event(days, time_ms=now - days * 86_400_000 + 60_000) for days in (20, 11, 9, 0)])
    assert tackboard("sequences", "retain", path, "--days", "10", "--json").json()["num_dropped"] == 2
    with open_store(path) as store:
        assert store.read(1, ["item_id"]).columns["item_id"].values.tolist() == [9, 0]
    assert tackboard("sequences", "retain", path, "--days", "10").out == "dropped 0\n"
    for wrong in ("0", "inf", "nan"):
        assert tackboard("sequences", "retain", path, "--days", wrong).code == 2


def test_migrate_gives_an_old_store_its_checksums_once(tackboard: Program, path: Path) -> None:
    shutil.copy(GOLDEN / "sequences-v1.db", path)
    answer = tackboard("sequences", "retain", path, "--days", "9")
    assert answer.code == 2 and f"tackboard sequences migrate {path}" in answer.err
    assert "has no checksums" in tackboard("verify", path).out
    answer = tackboard("sequences", "migrate", path)
    assert answer.code == 0 and "format version 2 now: 2 users, 30 events" in answer.out
    assert tackboard("sequences", "migrate", path, "--json").json() == {"store": str(path), "is_changed": False}
    assert "nothing was changed" in tackboard("sequences", "migrate", path).out
    assert tackboard("verify", path).out == f"{path}: sequence store intact, 2 users, 30 events\n"


def test_a_password_is_not_shown() -> None:
    assert without_password("redis://me:secret@host:6379/0") == "redis://host:6379/0"
    assert without_password("redis://host:6379/0") == "redis://host:6379/0"
    assert without_password("stores/a@b.db") == "stores/a@b.db"
