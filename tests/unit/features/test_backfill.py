"""A backfill makes a new snapshot with the features of every event, or leaves the old one as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core import files
from tackboard.core.errors import DataError, UsageError
from tackboard.core.locks import _host
from tackboard.core.manifest import verify_manifest
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.features.backfill import Backfilled, backfill
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column, differing_rows
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.entity_tables import load_tables
from tackboard.features.language import (
    Context,
    Events,
    FeatureSet,
    Float,
    Int,
    Item,
    List,
    Request,
    String,
    User,
    Vector,
    cross,
    days,
    hours,
    sequence,
)
from tackboard.features.stored_features import FEATURES, read_features_table

item = Item(price=Float(minimum=0), look=Vector(2), tags=List(Int))
user = User(country=String())
events = Events(dwell_ms=Int(minimum=0), query=String())
context = Context(device=String(), slot=Int(default=9))
recent = events.newest(3)
EXPRESSIONS: dict[str, Any] = {
    "hour": Request().time.hour("Europe/Berlin"),
    "price": item.price,
    "look": item.look,
    "tags": item.tags,
    "country": user.country,
    "device": context.device,
    "slot": context.slot,
    "count": events.within(hours(20)).count(),
    "same": events.matching(events.item, item.id).count(),
    "dwell": events.decayed_sum(events.dwell_ms.fill_missing(0), half_life=days(1)),
    "last_query": events.last(events.query),
    "top": events.top(events.item, 2),
    "place": cross(user.country.fill_missing(""), item.id),
    "one": events.count() * 0 + 1,
    "history": sequence(item=recent.collect(events.item), query=recent.collect(events.query.fill_missing("-"))),
}


def make(version: int = 1, **changes: Any) -> FeatureSet:
    chosen = {name: value for name, value in (EXPRESSIONS | changes).items() if value is not None}
    return FeatureSet("rich", version=version, **chosen)


FEATURES_V1 = make()


def fill(folder: Path, features: FeatureSet = FEATURES_V1) -> Backfilled:
    return backfill(open_dataset(folder), features, quiet=True)


def at_once(dataset: Dataset, features: FeatureSet) -> dict[str, Column]:
    """The slow twin: everything in memory, every event one request."""
    plan = features.plan
    table = dataset.read_events(["user_id", "item_id", "time_ms"])
    log, users, items = load_tables(dataset, plan)
    rows = RequestRows(
        user_ids=table["user_id"].to_numpy(),
        request_ms=table["time_ms"].to_numpy(),
        item_ids=table["item_id"].to_numpy(),
        context=context_columns(plan, dataset.read_events(["context"])["context"]) if context_sources(plan) else {},
    )
    return BatchExecutor(plan, events=log, users=users, items=items).compute(rows)


def check_equal(dataset: Dataset, features: FeatureSet) -> None:
    found, expected = read_features_table(dataset), at_once(dataset, features)
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert not len(differing_rows(found[name], column)), name


def snapshots(folder: Path) -> list[str]:
    """What lies in a dataset's folder, `latest` aside."""
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def test_a_new_snapshot_holds_the_features_of_every_event(rich_dataset: Path) -> None:
    old = open_dataset(rich_dataset)
    result = fill(rich_dataset)
    new = open_dataset(rich_dataset)
    assert (result.path, result.num_rows, result.taken_over) == (new.path, old.num_events, [])
    assert result.computed == list(EXPRESSIONS)
    assert snapshots(rich_dataset) == sorted([old.path.name, new.path.name])
    check_equal(new, FEATURES_V1)
    verify_manifest(old.path, "dataset")
    assert new.manifest["name"] == old.manifest["name"] and new.manifest["source"] == old.manifest["source"]
    assert new.manifest["features"]["from"] == old.path.name
    assert {FEATURES, "features.json", "events.parquet"} <= {entry["name"] for entry in new.manifest["files"]}
    # What stays is linked, not copied.
    assert (old.path / "events.parquet").stat().st_ino == (new.path / "events.parquet").stat().st_ino
    assert {path.name for path in new.path.iterdir()} - {path.name for path in old.path.iterdir()} == {
        "features.json",
        FEATURES,
    }


def test_rows_see_only_what_was_received_before(rich_dataset: Path) -> None:
    fill(rich_dataset, FeatureSet("x", count=EXPRESSIONS["count"]))
    dataset = open_dataset(rich_dataset)
    table = dataset.read_events(["user_id", "time_ms", "received_ms"]).to_pylist()
    counts = read_features_table(dataset, ["count"])["count"].to_pylist()
    for row, count in zip(table, counts, strict=True):
        seen = [
            other
            for other in table
            if other["user_id"] == row["user_id"]
            and other["received_ms"] < row["time_ms"]
            and row["time_ms"] - other["time_ms"] < hours(20)
        ]
        assert count == len(seen)


def test_chunks_and_row_groups_do_not_show(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 5)
    path = make_rich_dataset(tmp_path)
    fill(path)
    written = pq.ParquetFile(path / "latest" / FEATURES)
    assert written.num_row_groups > 3
    check_equal(open_dataset(path), FEATURES_V1)
    more = make(more=events.count())
    assert fill(path, more).computed == ["more"]
    assert pq.ParquetFile(path / "latest" / FEATURES).num_row_groups == written.num_row_groups
    check_equal(open_dataset(path), more)


def test_the_same_set_again_does_nothing(rich_dataset: Path) -> None:
    first = fill(rich_dataset)
    before = snapshots(rich_dataset)
    again = fill(rich_dataset, FeatureSet.from_json(FEATURES_V1.to_json()))
    assert again.path == first.path
    assert (again.computed, again.taken_over) == ([], list(EXPRESSIONS))
    assert snapshots(rich_dataset) == before
    other_words = fill(rich_dataset, make(count=EXPRESSIONS["count"].described("Events of the last hours.")))
    assert other_words.path != first.path and other_words.computed == []
    check_equal(open_dataset(rich_dataset), FEATURES_V1)


def test_what_did_not_change_is_taken_over(rich_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rich_dataset)
    asked: list[list[str]] = []
    compute = BatchExecutor.compute

    def spy(executor: BatchExecutor, rows: RequestRows) -> dict[str, Column]:
        asked.append(list(executor.plan.features))
        return compute(executor, rows)

    monkeypatch.setattr(BatchExecutor, "compute", spy)
    widened = Item(price=Float(minimum=-1), look=Vector(2), tags=List(Int))
    new = make(price=widened.price, more=events.distinct(events.item))
    result = fill(rich_dataset, new)
    assert asked == [["price", "more"]] == [result.computed]
    assert {change.feature for change in result.changes if " moved " not in change.sentence} == {"price", "more"}
    monkeypatch.undo()
    check_equal(open_dataset(rich_dataset), new)


def test_another_time_zone_database_computes_what_depends_on_it(
    rich_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.features.feature_set.database_version", lambda: "1999z")
    fill(rich_dataset)
    monkeypatch.undo()
    assert fill(rich_dataset).computed == ["hour"]


def test_a_change_that_needs_a_version_is_refused_until_it_has_one(rich_dataset: Path) -> None:
    fill(rich_dataset)
    before = snapshots(rich_dataset)
    with pytest.raises(UsageError, match=r"feature tags \(test_backfill\.py:\d+\) is removed"):
        fill(rich_dataset, make(tags=None))
    assert snapshots(rich_dataset) == before
    result = fill(rich_dataset, make(version=2, tags=None))
    assert result.computed == []
    check_equal(open_dataset(rich_dataset), make(version=2, tags=None))


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        (Item(price=Float(maximum=2)).price, r"feature x \(test_backfill\.py:\d+\): item\.price"),
        (Item(cost=Float()).cost, "item.cost is not in the data"),
    ],
)
def test_data_that_does_not_fit_leaves_the_old_snapshot(rich_dataset: Path, expression: Any, says: str) -> None:
    before, target = snapshots(rich_dataset), os.readlink(rich_dataset / "latest")
    with pytest.raises(DataError, match=says):
        fill(rich_dataset, FeatureSet("x", x=expression))
    assert (snapshots(rich_dataset), os.readlink(rich_dataset / "latest")) == (before, target)


def test_a_failure_half_way_leaves_the_old_snapshot(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 5)
    path = make_rich_dataset(tmp_path)
    before = snapshots(path)
    seen = []

    def fail_later(point: str) -> None:
        seen.append(point)
        if seen.count(f"{FEATURES}:after-group") == 3:
            assert len([place for place in path.glob(".*.tmp-*") if place.is_dir()]) == 1
            raise DataError("planted")

    monkeypatch.setattr(files, "observer", fail_later)
    with pytest.raises(DataError, match="planted"):
        fill(path)
    assert snapshots(path) == before and not list(path.glob(".*"))


def test_at_every_point_latest_is_whole(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    features = FeatureSet("few", count=EXPRESSIONS["count"])
    path = make_rich_dataset(tmp_path / "all", num_users=2)
    monkeypatch.setattr(files, "observer", points.append)
    fill(path, features)
    monkeypatch.setattr(files, "observer", None)
    assert points[-1] == "latest:after-rename"
    for number in range(len(points)):
        path = make_rich_dataset(tmp_path / str(number), num_users=2)
        old = path.joinpath("latest").resolve()
        passed: list[str] = []

        def stop(point: str, number: int = number, passed: list[str] = passed) -> None:
            passed.append(point)
            if len(passed) == number + 1:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "observer", stop)
        with pytest.raises(OSError, match="No space left"):
            fill(path, features)
        monkeypatch.setattr(files, "observer", None)
        verify_manifest(path.joinpath("latest").resolve(), "dataset")
        assert (path.joinpath("latest").resolve() == old) == (points[number] != "latest:after-rename")
        assert not list(path.glob(".*"))
        fill(path, features)
        check_equal(open_dataset(path), features)
        assert len(snapshots(path)) == 2, "what was complete is taken up, not made again"


def test_files_are_copied_where_links_are_refused(rich_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    old = (rich_dataset / "latest").resolve()
    monkeypatch.setattr(os, "link", refuse_link)
    new = fill(rich_dataset).path
    assert (old / "events.parquet").stat().st_ino != (new / "events.parquet").stat().st_ino
    verify_manifest(new, "dataset")


def test_only_the_newest_snapshot_of_a_dataset(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_rich_dataset(tmp_path)
    older = open_dataset(path)
    make_rich_dataset(tmp_path, num_users=4)
    with pytest.raises(UsageError, match="is not the newest snapshot") as refused:
        backfill(older, FEATURES_V1, quiet=True)
    assert refused.value.fix.startswith(f"give {path}; if you did, another job has made a newer snapshot")
    # An import that ends while features are computed must not be undone.
    newer = open_dataset(path)
    newest = open_dataset(make_rich_dataset(tmp_path, num_users=5)).path
    files.replace_symlink(path / "latest", newer.path.name)

    def import_meanwhile(point: str) -> None:
        if point == f"{FEATURES}:after-write":
            files.replace_symlink(path / "latest", newest.name)

    monkeypatch.setattr(files, "observer", import_meanwhile)
    with pytest.raises(DataError, match="another job made a newer snapshot"):
        backfill(newer, FEATURES_V1, quiet=True)
    assert open_dataset(path).num_users == 5
    assert len(snapshots(path)) == 3


def test_leftovers_of_a_killed_backfill_are_removed(rich_dataset: Path) -> None:
    (rich_dataset / ".20260101T000000Z-00000000.tmp-1a2b").mkdir()
    (rich_dataset / ".20260101T000000Z-00000000.tmp-1a2b.lock").write_bytes(_host())
    fill(rich_dataset)
    assert not list(rich_dataset.glob(".*"))


def test_one_user_with_more_events_than_a_chunk(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 4)
    path = make_rich_dataset(tmp_path, user=pa.array(np.zeros(63, dtype=np.int64)))
    fill(path)
    assert pq.ParquetFile(path / "latest" / FEATURES).num_row_groups == 1
    check_equal(open_dataset(path), FEATURES_V1)
