from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.cli.data_forget import _without_password
from tackboard.core.hashing import string_id
from tackboard.events.privacy.forgetting import read_forgotten
from tackboard.events.sequence_store import create_store, open_store

Program = Callable[..., Any]
START_MS = 1_700_000_000_000
SECRET = "anna-1234567"


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    return make_dataset(tmp_path, [(user, "a", "click", "home", START_MS) for user in (SECRET, "ben", SECRET)])


def test_a_user_goes_on_the_list_and_what_remains_is_told(tackboard: Program, dataset: Path) -> None:
    answer = tackboard("data", "forget", "--user", SECRET, "--data", dataset)
    assert answer.code == 0
    assert read_forgotten(dataset).user_ids.tolist() == [string_id(SECRET)]
    snapshot = (dataset / "latest").resolve()
    assert f"{snapshot.name} still holds 1 forgotten, with 2 events" in answer.out
    assert f"tackboard data retain {dataset.resolve()} --prune" in answer.out
    assert SECRET not in answer.out + answer.err


def test_users_from_standard_input(tackboard: Program, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SECRET}\n\nben\n"))
    answer = tackboard("data", "forget", "--user", "-", "--data", dataset, "--json")
    result = answer.json()
    assert result["num_users"] == 2
    assert result["datasets"][0]["snapshots"][0]["num_users"] == 2
    assert set(read_forgotten(dataset).user_ids.tolist()) == {string_id(SECRET), string_id("ben")}
    assert SECRET not in answer.out


def test_a_store_forgets_at_once(tackboard: Program, dataset: Path, tmp_path: Path) -> None:
    event = {"item_id": 1, "action": "click", "surface": "home", "time_ms": START_MS}
    with create_store(tmp_path / "store.db") as store:
        store.append(string_id(SECRET), [event])
        store.append(42, [event, event | {"time_ms": START_MS + 1}])
        store.append(5, [event])
    answer = tackboard("data", "forget", "--user", SECRET, "--user", "42", "--store", tmp_path / "store.db")
    assert answer.code == 0
    assert answer.out == f"{tmp_path / 'store.db'}: 3 events removed, of 2 of 2 users\n"
    assert answer.err == ""
    with open_store(tmp_path / "store.db") as store:
        assert [store.read(user).num_events for user in (string_id(SECRET), 42, 5)] == [0, 0, 1]
    assert len(read_forgotten(dataset)) == 0
    missing = tackboard("data", "forget", "--user", SECRET, "--data", dataset, "--store", tmp_path / "nothing.db")
    assert missing.code == 2 and SECRET not in missing.err
    assert len(read_forgotten(dataset)) == 1, "the list comes first"


def test_a_user_who_occurs_nowhere_is_told_of(tackboard: Program, dataset: Path, tmp_path: Path) -> None:
    create_store(tmp_path / "store.db").close()
    names = ["--user", SECRET, "--user", f" {SECRET}", "--user", "bne"]
    places = ["--data", dataset, "--store", tmp_path / "store.db"]
    answer = tackboard("data", "forget", *names, *places)
    assert answer.code == 0
    assert f"{dataset.resolve()}: 2 users will be in no further snapshot; 1 found in those there are\n" in answer.out
    assert "0 events removed, of 0 of 2 users" in answer.out
    assert answer.err == "warning: found in none of these: 1 of 2 users given; look whether the ids are right\n"
    assert set(read_forgotten(dataset).user_ids.tolist()) == {string_id(SECRET), string_id("bne")}
    result = tackboard("data", "forget", *names, *places, "--json").json()
    assert (result["num_users"], result["num_found"]) == (2, 1)
    assert (result["datasets"][0]["num_found"], result["stores"][0]["num_found"]) == (1, 0)


def test_a_password_is_not_shown() -> None:
    assert _without_password("redis://me:secret@host:6379/0") == "redis://host:6379/0"
    assert _without_password("redis://host:6379/0") == "redis://host:6379/0"
    assert _without_password("stores/a@b.db") == "stores/a@b.db"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--user", "a"], 2, "nothing to forget them in"),
        (["--user", " ", "--data", "{dataset}"], 2, "no user to forget"),
        (["--data", "{dataset}"], 2, "--user"),
        (["--user", SECRET, "--data", "nowhere"], 3, "nowhere is no dataset"),
    ],
)
def test_mistakes(tackboard: Program, dataset: Path, arguments: list[str], code: int, says: str) -> None:
    answer = tackboard("data", "forget", *(word.format(dataset=dataset) for word in arguments))
    assert answer.code == code and says in answer.err and SECRET not in answer.err
    assert len(read_forgotten(dataset)) == 0
