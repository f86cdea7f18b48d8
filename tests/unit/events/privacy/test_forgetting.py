from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core import files
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.hashing import string_id
from tackboard.core.manifest import seal
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import (
    FILE_NAME,
    Forgotten,
    add_forgotten,
    dataset_folder,
    forget_users,
    promote,
    read_forgotten,
    remains_in,
    require_clean,
    shown_to_others,
    snapshots_of,
    user_ids_of,
    without_forgotten,
)

START_MS = 1_700_000_000_000


@pytest.fixture
def folder(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    return make_dataset(tmp_path, [(user, 7, "click", "home", START_MS + user) for user in (1, 2, 2, 3)])


def listed(*user_ids: int) -> Forgotten:
    return Forgotten(np.array(sorted(user_ids), dtype=np.int64))


def test_a_name_has_every_id_it_can_have() -> None:
    assert user_ids_of("anna") == [string_id("anna")]
    assert user_ids_of(" 42 ") == [string_id("42"), 42]
    assert user_ids_of("-42") == [string_id("-42"), -42]
    assert user_ids_of("042") == [string_id("042")]
    assert user_ids_of(str(2**63)) == [string_id(str(2**63))]
    assert user_ids_of("42.0") == [string_id("42.0")]
    with pytest.raises(UsageError, match="name of a user is empty"):
        user_ids_of("  ")


def test_the_list_grows_and_holds_each_once(folder: Path) -> None:
    assert len(read_forgotten(folder)) == 0
    add_forgotten(folder, [5, 2])
    before = (folder / FILE_NAME).stat().st_mtime_ns
    assert add_forgotten(folder, [2]).user_ids.tolist() == [2, 5]
    assert (folder / FILE_NAME).stat().st_mtime_ns == before, "nothing new, nothing written"
    add_forgotten(folder, [-9])
    assert read_forgotten(folder).user_ids.tolist() == [-9, 2, 5]
    assert read_forgotten(folder).holds(np.array([2, 3, -9])).tolist() == [True, False, True]


def test_two_at_once_both_end_on_the_list(folder: Path) -> None:
    threads = [threading.Thread(target=add_forgotten, args=(folder, [user])) for user in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_forgotten(folder).user_ids.tolist() == list(range(20))
    assert not list(folder.glob(".*"))


def test_a_damaged_list_stops_everybody(folder: Path) -> None:
    add_forgotten(folder, [12345])
    path = folder / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"12345", b"12344"))
    for attempt in (lambda: read_forgotten(folder), lambda: add_forgotten(folder, [1])):
        with pytest.raises(CorruptFileError, match="forgotten.json is corrupt") as error:
            attempt()
        assert "12344" not in str(error.value)
    path.write_bytes(seal({"kind": "forgotten users", "format_version": 99, "user_ids": []}))
    with pytest.raises(DataError, match="format version 99"):
        read_forgotten(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptFileError, match="cannot be read"):
        read_forgotten(folder)


def test_tables_lose_their_rows() -> None:
    by_id = pa.table({"user_id": [1, 2, 3], "x": [1, 2, 3]})
    assert without_forgotten(by_id, listed(2))["x"].to_pylist() == [1, 3]
    assert without_forgotten(by_id, listed()) is by_id
    assert without_forgotten(by_id, listed(9)) is by_id
    by_name = pa.table({"user": pa.array(["anna", "ben", "anna"]).dictionary_encode(), "x": [1, 2, 3]})
    left = without_forgotten(by_name, listed(string_id("anna")))
    assert left["x"].to_pylist() == [2] and left.schema == by_name.schema
    assert left["user"].chunk(0).dictionary.to_pylist() == ["ben"], "a dictionary is written whole"
    events = pa.table({"user_id": [1, 2, 2], "request": pa.array(["a", "b", None])})
    shown = pa.table({"request": pa.array(["a", "b", "c", None]), "x": [1, 2, 3, 4]})
    assert shown_to_others(shown, events, listed(2))["x"].to_pylist() == [1, 3, 4]
    assert shown_to_others(shown, events, listed(5)) is shown
    assert shown_to_others(by_id, events, listed(2))["x"].to_pylist() == [1, 3]
    assert shown_to_others(shown, events.drop_columns(["request"]), listed(2)) is shown


def test_a_snapshot_is_not_promoted_over_a_list_that_grew(folder: Path) -> None:
    snapshot = open_dataset(folder).path
    forgotten = add_forgotten(folder, [1])
    promote(snapshot, forgotten)
    add_forgotten(folder, [2])
    (folder / "latest").unlink()
    with pytest.raises(DataError, match="users were forgotten while"):
        promote(snapshot, forgotten)
    assert not (folder / "latest").exists()
    promote(snapshot, read_forgotten(folder))
    assert (folder / "latest").resolve() == snapshot


def test_what_remains_is_told(folder: Path) -> None:
    snapshot = open_dataset(folder).path
    (listed_now,) = forget_users(["2", "nobody"], [folder])
    (remains,) = listed_now.remains
    assert listed_now.found == {2}
    assert forget_users(["nobody"], [folder])[0].found == frozenset(), "user 2 was forgotten before"
    assert (remains.snapshot, remains.num_users, remains.num_events) == (snapshot, 1, 2)
    assert forget_users(["2"], []) == []
    with pytest.raises(DataError, match="still holds 1 user on the list of forgotten users") as error:
        require_clean(snapshot, read_forgotten(folder))
    assert f"tackboard data retain {folder}" in str(error.value)
    assert remains_in(snapshot, listed()).num_users == 0
    (folder / ".leftover").mkdir()
    assert snapshots_of(folder) == [snapshot]


def test_a_snapshot_or_its_folder_may_be_given(folder: Path, tmp_path: Path) -> None:
    snapshot = open_dataset(folder).path
    assert dataset_folder(folder) == dataset_folder(snapshot) == dataset_folder(folder / "latest") == folder.resolve()
    with pytest.raises(DataError, match="is not a dataset's folder"):
        dataset_folder(tmp_path)


def test_an_import_leaves_forgotten_users_out_of_every_table(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    rows = [
        (name, "a", "click", "home", START_MS + place) for place, name in enumerate(("anna", "ben", "anna", "cleo"))
    ]
    folder = make_dataset(tmp_path, rows)
    add_forgotten(folder, user_ids_of("anna"))
    users = {"user": pa.array(["anna", "ben", "dora"]).dictionary_encode(), "age": [1, 2, 3]}
    shown = {"request": [7, 8, 9], "position": pa.array([0, 0, 0], pa.int32()), "item_id": [string_id("a")] * 3}
    make_dataset(
        tmp_path,
        rows,
        fields={"request": [7, 8, 7, None]},
        user_attributes=pa.table(users),
        impressions=pa.table(shown),
    )
    newest = open_dataset(folder)
    assert newest.read_events()["user"].to_pylist() and "anna" not in newest.read_events()["user"].to_pylist()
    assert set(newest.read_users()["user"].to_pylist()) == {"ben", "cleo", "dora"}
    impressions = newest.read_impressions()
    assert impressions is not None and impressions["request"].to_pylist() == [8, 9]
    assert (newest.num_events, newest.num_users) == (2, 2)
    for path in newest.path.iterdir():
        assert b"anna" not in path.read_bytes(), path
    add_forgotten(folder, [one for name in ("ben", "cleo") for one in user_ids_of(name)])
    with pytest.raises(DataError, match="all events belong to forgotten users"):
        make_dataset(tmp_path, rows)
    assert open_dataset(folder).path == newest.path


def test_a_user_comes_back_neither_as_text_nor_as_a_number(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, [(user, 7, "click", "home", START_MS) for user in (41, 42)])
    forget_users(["42"], [folder])
    make_dataset(tmp_path, [(user, 7, "click", "home", START_MS) for user in ("41", "42", "anna")])
    assert open_dataset(folder).read_users()["user"].to_pylist() in (["41", "anna"], ["anna", "41"])


def test_a_user_who_is_forgotten_while_an_import_runs_is_not_brought_back_by_it(
    folder: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_dataset(folder).path

    def forget_late(point: str) -> None:
        if point[:1].isdigit() and point.endswith(":after-rename"):
            monkeypatch.setattr(files, "observer", None)
            add_forgotten(folder, [2])

    monkeypatch.setattr(files, "observer", forget_late)
    rows = [(user, 8, "click", "home", START_MS + user) for user in (1, 2, 4)]
    with pytest.raises(DataError, match="users were forgotten while"):
        make_dataset(folder.parent, rows)
    assert open_dataset(folder).path == before
    make_dataset(folder.parent, rows)
    assert open_dataset(folder).read_users()["user_id"].to_pylist() == [1, 4]


def test_a_dataset_whose_newest_snapshot_is_gone(folder: Path) -> None:
    gone = open_dataset(folder).path
    for place in (folder, folder / "latest"):
        gone.rename(folder.parent / "elsewhere")
        with pytest.raises(CorruptFileError, match=f"latest points at {gone.name}, which does not exist") as error:
            open_dataset(place)
        assert "restore a copy" in error.value.fix
        with pytest.raises(CorruptFileError, match="which does not exist"):
            dataset_folder(folder)
        (folder.parent / "elsewhere").rename(gone)
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("nothing")
    with pytest.raises(CorruptFileError) as error:
        open_dataset(folder)
    assert error.value.fix == f"ln -sfn {gone.name} {folder / 'latest'}"
