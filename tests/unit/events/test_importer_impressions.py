"""A log comes in together with what was shown: users and items that were only shown are known, bad rows are counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import open_dataset
from tackboard.events.importer import ImportConfig, import_log
from tackboard.events.privacy.forgetting import add_forgotten, user_ids_of

LOG = "who,what,when,call\nann,lamp,2024-05-01T10:00:20Z,r1\nbob,sofa,2024-05-01T10:02:00Z,r2\n"
SHOWN = (
    "who,what,when,call,position\n"
    "bob,sofa,2024-05-01T10:01:00Z,r2,1\n"
    "bob,vase,2024-05-01T10:01:00Z,r2,0\n"
    "ann,lamp,2024-05-01T10:00:00Z,r1,0\n"
    "cid,lamp,2024-05-01T10:00:00Z,r3,0\n"
)


@pytest.fixture
def config(tmp_path: Path) -> ImportConfig:
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "shown.csv").write_text(SHOWN)
    (tmp_path / "items.csv").write_text("what,colour\nlamp,red\n")
    return ImportConfig(
        files=[tmp_path / "log.csv"],
        user="who",
        item="what",
        time="when",
        request="call",
        items=tmp_path / "items.csv",
        impressions=[tmp_path / "shown.csv"],
    )


def test_what_was_shown_is_stored_and_known(config: ImportConfig, tmp_path: Path) -> None:
    path, report = import_log(config, tmp_path / "datasets", "shop")
    dataset = open_dataset(path)
    impressions = dataset.read_impressions()
    assert impressions is not None
    assert impressions.column_names == ["user_id", "time_ms", "request", "position", "item_id"]
    assert (report.impressions_kept, report.impression_rows_dropped) == (4, 0)
    items = {row["item"]: row for row in dataset.read_items().to_pylist()}
    users = {row["user"]: row for row in dataset.read_users().to_pylist()}
    assert {name: (row["num_events"], row["colour"]) for name, row in items.items()} == {
        "lamp": (1, "red"),
        "sofa": (1, None),
        "vase": (0, None),
    }
    assert {name: row["num_events"] for name, row in users.items()} == {"ann": 1, "bob": 1, "cid": 0}
    shown = {(row["user_id"], row["request"], row["item_id"], row["position"]) for row in impressions.to_pylist()}
    assert (users["bob"]["user_id"], "r2", items["vase"]["item_id"], 0) in shown
    assert impressions["user_id"].to_pylist() == sorted(impressions["user_id"].to_pylist())


def test_bad_rows_are_counted_or_refused(config: ImportConfig, tmp_path: Path) -> None:
    (tmp_path / "shown.csv").write_text(SHOWN + "ann,lamp,soon,r1,0\n")
    with pytest.raises(DataError, match="1 of 5 rows of .*shown.csv have no usable user"):
        import_log(config, tmp_path / "datasets", "shop")
    assert not (tmp_path / "datasets").exists()
    _, report = import_log(dataclasses.replace(config, max_bad_share=0.2), tmp_path / "datasets", "shop")
    assert [text for _, text in report.fixes()] == [
        "rows of the impressions file without a usable user, item, time or request: dropped"
    ]


def test_forgotten_users_are_left_out_and_not_reported_as_kept(config: ImportConfig, tmp_path: Path) -> None:
    import_log(config, tmp_path / "datasets", "shop")
    ids = [user_id for name in ("cid", "bob") for user_id in user_ids_of(name)]
    add_forgotten(tmp_path / "datasets" / "shop", ids)
    path, report = import_log(config, tmp_path / "datasets", "shop")
    dataset = open_dataset(path)
    impressions = dataset.read_impressions()
    assert impressions is not None and impressions["request"].to_pylist() == ["r1"]
    assert dataset.read_users()["user"].to_pylist() == ["ann"]
    assert (report.rows_kept, report.forgotten_events) == (dataset.num_events, 1)
    assert (report.impressions_kept, report.forgotten_impressions) == (1, 3)


def test_a_column_of_positions_that_only_one_of_the_files_has(config: ImportConfig, tmp_path: Path) -> None:
    (tmp_path / "shown.csv").write_text(SHOWN.replace("position", "slot").replace("r2,0", "r2,top"))
    _, report = import_log(config, tmp_path / "datasets", "shop")
    assert report.impressions_without_position == 4
    path, report = import_log(dataclasses.replace(config, position="slot"), tmp_path / "datasets", "shop")
    assert (report.impressions_without_position, report.unparsable_impression_positions) == (1, 1)
    impressions = open_dataset(path).read_impressions()
    assert impressions is not None and sorted(impressions["position"].drop_null().to_pylist()) == [0, 0, 1]
    assert (1, "unparsable positions in the impressions file: left empty") in report.fixes()
    with pytest.raises(DataError, match="has no column 'rank'"):
        import_log(dataclasses.replace(config, position="rank"), tmp_path / "datasets", "shop")
    (tmp_path / "log.csv").write_text("who,what,when,call,rank\nann,lamp,2024-05-01T10:00:20Z,r1,3\n")
    path, report = import_log(dataclasses.replace(config, position="rank"), tmp_path / "datasets", "shop")
    assert open_dataset(path).read_events(["position"])["position"].to_pylist() == [3]
    assert report.impressions_without_position == 4


@pytest.mark.parametrize("place", ["taken", "datasets/taken"])
def test_a_file_in_the_way(config: ImportConfig, tmp_path: Path, place: str) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / place).write_text("")
    root, name = (tmp_path / "taken", "shop") if place == "taken" else (tmp_path / "datasets", "taken")
    with pytest.raises(UsageError, match="taken is a file"):
        import_log(config, root, name)
