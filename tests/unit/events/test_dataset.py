from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core import files
from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import check_name, open_dataset, write_dataset
from tackboard.events.privacy.forgetting import add_forgotten


def events(num_rows: int = 4) -> pa.Table:
    rows = range(num_rows)
    return pa.table(
        {
            "user": pa.array([row % 2 for row in rows], pa.int64()),
            "item": pa.array([f"item-{row % 3}" for row in rows]).dictionary_encode(),
            "action": pa.array(["click"] * num_rows).dictionary_encode(),
            "surface": pa.array(["home"] * num_rows).dictionary_encode(),
            "time_ms": pa.array([1000 * (row + 1) for row in rows], pa.int64()),
            "received_ms": pa.array([1000 * (row + 1) for row in rows], pa.int64()),
            "order": pa.array(rows, pa.int64()),
        }
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write_dataset(tmp_path, "log", events(), truth={"seed": 1}, source={"kind": "test"})
    dataset = open_dataset(tmp_path / "log")
    assert dataset.path == path.resolve()
    assert (dataset.name, dataset.num_events, dataset.num_users, dataset.num_items) == ("log", 4, 2, 3)
    assert (dataset.user_type, dataset.item_type) == ("int64", "string")
    assert (dataset.actions, dataset.surfaces) == (["click"], ["home"])
    assert dataset.read_events(["user_id"])["user_id"].to_pylist() == [0, 0, 1, 1]
    assert dataset.read_items()["num_events"].to_pylist().count(2) == 1
    assert dataset.read_users().column_names == ["user", "user_id", "num_events", "first_ms", "last_ms"]
    assert dataset.read_truth() == {"seed": 1}
    assert dataset.read_impressions() is None
    assert dataset.manifest["source"] == {"kind": "test"}


def test_labelled_requests_lie_in_the_buckets_of_their_users(tmp_path: Path) -> None:
    one = pa.array([[1]] * 3)
    requests = pa.table({"user_id": [0, 1, 1], "time_ms": [4000, 2000, 5000], "item_id": one, "label_save": one})
    path = write_dataset(tmp_path, "log", events(), requests=requests)
    dataset = open_dataset(path)
    assert dataset.layout.rows_of("requests", 0) == (0, 3)
    assert pq.read_table(path / "requests.parquet").to_pylist() == requests.to_pylist()
    add_forgotten(tmp_path / "log", [0])
    again = write_dataset(tmp_path, "log", events(), requests=requests)
    assert pq.read_table(again / "requests.parquet")["user_id"].to_pylist() == [1, 1]


def test_row_groups_and_string_types_are_as_documented(tmp_path: Path) -> None:
    path = write_dataset(tmp_path, "log", events(70_000))
    file = pq.ParquetFile(path / "events.parquet")
    # A row group is a bucket: 35,000 events of each of two users, who do not fit into one together.
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [35_000, 35_000]
    assert pa.types.is_dictionary(file.schema_arrow.field("item").type)


def test_a_new_snapshot_moves_latest_and_leaves_the_old_one(tmp_path: Path) -> None:
    first = write_dataset(tmp_path, "log", events(4))
    second = write_dataset(tmp_path, "log", events(6))
    assert open_dataset(tmp_path / "log").path == second.resolve()
    assert open_dataset(first).num_events == 4
    assert sorted(p.name for p in (tmp_path / "log").iterdir()) == sorted([first.name, second.name, "latest"])


def test_the_same_events_imported_at_once_are_one_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101T000000Z")  # Both began in the same second.
    others: list[Path] = []

    def import_too(point: str) -> None:
        if point.startswith("20260101T000000Z") and point.endswith(":before-rename") and not others:
            others.append(Path())
            others.append(write_dataset(tmp_path, "tiny", events()))

    monkeypatch.setattr(files, "observer", import_too)
    path = write_dataset(tmp_path, "tiny", events())
    assert others[1:] == [path]
    assert "the same events were imported twice in the same second" in capsys.readouterr().err
    assert open_dataset(tmp_path / "tiny").path == path.resolve()
    assert sorted(entry.name for entry in (tmp_path / "tiny").iterdir()) == [path.name, "latest"]


def test_a_writer_that_dies_at_any_point_leaves_the_old_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path, "log", events(4))
    points: list[str] = []
    monkeypatch.setattr(files, "observer", points.append)
    write_dataset(tmp_path / "elsewhere", "log", events(6))
    before_latest = points[: points.index("latest:before-rename")]

    for last in range(len(before_latest)):
        left = iter(range(last))

        def observe(_point: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise ValueError("died")

        monkeypatch.setattr(files, "observer", observe)
        with pytest.raises(ValueError, match="died"):
            write_dataset(tmp_path, "log", events(6))
        monkeypatch.setattr(files, "observer", None)
        assert open_dataset(tmp_path / "log").num_events == 4


def test_fields_versions_and_vectors_are_written_and_read_back(tmp_path: Path) -> None:
    table = events().append_column("dwell", pa.array([5, None, 7, 8])).append_column("page", pa.array(["a", None] * 2))
    items = pa.table(
        {
            "item": pa.array(["item-0", "item-0", "item-1"]).dictionary_encode(),
            "valid_from_ms": [10, 20, 10],
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
        }
    )
    dataset = open_dataset(write_dataset(tmp_path, "log", table, item_attributes=items))
    assert dataset.fields == {"dwell": "int", "page": "string"}
    assert dataset.statistics["fields"]["dwell"] == {"type": "int", "num_missing": 1}
    assert dataset.read_events(["order", "dwell"]).sort_by("order")["dwell"].to_pylist() == [5, None, 7, 8]
    vectors = {row["item"]: row["vector"] for row in dataset.read_items().to_pylist()}
    assert vectors == {"item-0": [3.0, 4.0], "item-1": None, "item-2": None}
    history = dataset.read_history("item")
    assert history is not None and history.column_names == ["item_id", "valid_from_ms", "vector"]
    assert history["vector"].type == dataset.read_items(["vector"])["vector"].type == pa.list_(pa.float32(), 2)
    assert history.num_rows == 3
    assert dataset.read_history("user") is None
    with pytest.raises(UsageError, match="item, user"):
        dataset.read_history("items")


def test_a_path_without_a_dataset_names_the_closest_one(tmp_path: Path) -> None:
    write_dataset(tmp_path, "clicks", events())
    with pytest.raises(DataError, match="did you mean .*clicks"):
        open_dataset(tmp_path / "click")
    with pytest.raises(DataError, match="tackboard init"):
        open_dataset(tmp_path / "nowhere" / "at" / "all")


def test_a_public_dataset_that_is_not_there_yet_is_imported(tmp_path: Path) -> None:
    """Its own name counts for more than a name that is close."""
    write_dataset(tmp_path, "ml-1m2", events())
    with pytest.raises(DataError, match="ml-1m holds no dataset") as caught:
        open_dataset(tmp_path / "ml-1m")
    assert caught.value.fix.endswith(f"then `tackboard data import ml-1m FILE --out {tmp_path}`")
    assert "https://grouplens.org/" in caught.value.fix
    with pytest.raises(DataError) as caught:
        open_dataset("datasets/ml-1m")
    assert caught.value.fix.endswith("`tackboard data import ml-1m FILE`")


def test_no_events_and_bad_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no events"):
        write_dataset(tmp_path, "log", events(0))
    for name in ("", "../up", "a/b", ".hidden", "x" * 101):
        with pytest.raises(UsageError):
            check_name(name)
    assert not list(tmp_path.iterdir())


def test_events_come_in_pieces_of_whole_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 3)
    users = [0] * 2 + [1] * 7 + [2] + [3] * 2 + [4] * 3
    table = events(len(users)).set_column(0, "user", pa.array(users))
    write_dataset(tmp_path, "log", table)
    dataset = open_dataset(tmp_path / "log")
    pieces = list(dataset.event_chunks(["action", "user_id"]))
    assert [piece.num_rows for piece in pieces] == [2, 7, 3, 3]
    assert pieces[0].column_names == ["user_id", "action"]
    assert [user for piece in pieces for user in piece["user_id"].to_pylist()] == users
