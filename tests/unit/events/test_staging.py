"""A snapshot made from another: whole or not at all, and never made twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tackboard.core import files
from tackboard.core.errors import DataError, UsageError
from tackboard.core.manifest import verify_manifest
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import add_forgotten
from tackboard.events.staging import check_newest, derive_snapshot

EVENTS = [(user, item, "click", "home", 1000 * item) for user in range(3) for item in range(4)]


@pytest.fixture
def folder(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    return make_dataset(tmp_path, EVENTS)


def derive(folder: Path, text: str, note: str = "words") -> Path:
    def fill(staging: Path) -> list[str]:
        assert (folder / "latest").resolve() != staging
        (staging / f"{note}.txt").write_text(text)
        return [f"{note}.txt"]

    return derive_snapshot(open_dataset(folder), note, {"text": text}, replaced=(f"{note}.txt",), fill=fill)


def test_what_stays_is_linked_and_what_is_new_replaces(folder: Path) -> None:
    old = open_dataset(folder)
    first = derive(folder, "one")
    second = derive(folder, "two")
    new = open_dataset(folder)
    assert new.path == second and (second / "words.txt").read_text() == "two" and len(list(folder.glob("[0-9]*"))) == 3
    for name in ("events.parquet", "statistics.json"):
        assert (old.path / name).stat().st_ino == (second / name).stat().st_ino
    assert (first / "words.txt").read_text() == "one", "a snapshot never changes"
    assert new.manifest["source"] == old.manifest["source"] and new.manifest["words"]["from"] == first.name
    third = derive(folder, "1", "numbers")
    assert {"words.txt", "numbers.txt"} <= {entry.name for entry in third.iterdir()}
    assert {"words", "numbers"} <= set(open_dataset(folder).manifest), "two kinds of additions keep each other"


def test_what_was_complete_is_taken_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (folder / "latest").resolve()

    def stop(point: str) -> None:
        if point == "latest:before-rename":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "observer", stop)
    with pytest.raises(OSError, match="Input/output"):
        derive(folder, "one")
    monkeypatch.setattr(files, "observer", None)
    assert (folder / "latest").resolve() == old
    complete = next(path for path in folder.glob("[0-9]*") if path != old)

    def never(_: Path) -> list[str]:
        raise AssertionError

    found = derive_snapshot(open_dataset(folder), "words", {"text": "one"}, replaced=(), fill=never)
    assert found == complete == (folder / "latest").resolve()


def test_a_failure_leaves_nothing(folder: Path) -> None:
    before = sorted(os.listdir(folder))

    def fail(staging: Path) -> list[str]:
        (staging / "half.txt").write_text("x")
        raise DataError("planted")

    with pytest.raises(DataError, match="planted"):
        derive_snapshot(open_dataset(folder), "words", 1, replaced=(), fill=fail)
    assert sorted(os.listdir(folder)) == before


def test_forgotten_users_do_not_come_along(folder: Path) -> None:
    add_forgotten(folder, [2])
    with pytest.raises(DataError, match="still holds 1 user on the list of forgotten users"):
        derive(folder, "one")

    def without(staging: Path) -> list[str]:
        users = open_dataset(folder).read_users()
        pq.write_table(users.filter(pc.not_equal(users["user_id"], 2)), staging / "users.parquet")
        return ["users.parquet"]

    path = derive_snapshot(open_dataset(folder), "fewer", 1, replaced=("users.parquet",), fill=without)
    assert derive(folder, "one") != path


def test_a_user_who_is_forgotten_meanwhile(folder: Path) -> None:
    old = (folder / "latest").resolve()

    def forget(_: Path) -> list[str]:
        add_forgotten(folder, [1])
        return []

    with pytest.raises(DataError, match="users were forgotten while"):
        derive_snapshot(open_dataset(folder), "words", 1, replaced=(), fill=forget)
    assert (folder / "latest").resolve() == old


def test_only_the_newest_is_added_to(folder: Path, make_dataset: Callable[..., Path]) -> None:
    older = open_dataset(folder)
    check_newest(older)
    make_dataset(folder.parent, EVENTS[:5], name=folder.name)
    with pytest.raises(UsageError, match="is not the newest snapshot") as refused:
        check_newest(older)
    assert refused.value.fix.startswith(f"give {folder}; if you did, another job has made a newer snapshot")
    newest = open_dataset(folder)

    def import_meanwhile(_: Path) -> list[str]:
        files.replace_symlink(folder / "latest", older.path.name)
        return []

    with pytest.raises(DataError, match="another job made a newer snapshot of .* meanwhile"):
        derive_snapshot(newest, "words", 1, replaced=(), fill=import_meanwhile)
    verify_manifest((folder / "latest").resolve(), "dataset")
    assert len(list(folder.glob("[0-9]*"))) == 2
