from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.events import layout as layout_module
from tackboard.events.checks.quality import check_dataset
from tackboard.events.dataset import INDEX, Dataset, index_folder, open_dataset
from tackboard.events.layout import Layout
from tackboard.events.privacy import retention
from tackboard.events.privacy.forgetting import add_forgotten, read_forgotten, remains_in
from tackboard.events.privacy.retention import prune, retain, snapshots_in_use

DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
NUM_USERS, NUM_DAYS = 12, 10


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets in a dataset of a hundred events."""
    import tackboard.events.dataset as dataset_module

    monkeypatch.setattr(dataset_module, "ROWS_PER_BUCKET", 20)
    monkeypatch.setattr(retention, "ROWS_PER_BUCKET", 20)


@pytest.fixture
def folder(small_buckets: None, make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    """Users 100 to 111; user 100 + n has an event a day from day n % 3 to day 9 - n % 4. With every kind of file."""
    events = [
        (100 + user, (user + day) % 7, "click", "home", START_MS + day * DAY_MS + user)
        for user in range(NUM_USERS)
        for day in range(user % 3, NUM_DAYS - user % 4)
    ]
    # A request for every two days, so that some lose one of their two events.
    requests = [10_000 * user + (time - START_MS) // (2 * DAY_MS) for user, *_, time in events]
    users = {
        "user": np.repeat(np.arange(100, 115), 2),
        "valid_from_ms": np.tile([START_MS, START_MS + 5 * DAY_MS], 15),
        "age": np.arange(30),
    }
    folder = make_dataset(
        tmp_path,
        events,
        fields={"request": requests, "price": [float(user) for user, *_ in events]},
        item_attributes=pa.table({"item": np.arange(8), "birth_ms": np.full(8, START_MS)}),
        user_attributes=pa.table(users),
        impressions=pa.table(
            {
                "request": [*requests, 5],
                "position": pa.array([0] * (len(requests) + 1), pa.int32()),
                "item_id": [0] * (len(requests) + 1),
            }
        ),
        truth={"seed": 1},
    )
    add_files(open_dataset(folder))
    return folder


def add_files(dataset: Dataset) -> None:
    """features.parquet, and requests.parquet with one request a day of every user, also of one without events."""
    snapshot, layout = dataset.path, dataset.layout
    events = dataset.read_events(["user_id", "time_ms"])
    pq.write_table(
        events.rename_columns(["copy_of_user", "copy_of_time"]), snapshot / "features.parquet", row_group_size=20
    )
    (snapshot / "features.json").write_text("{}")
    users = np.repeat(np.arange(99, 112), NUM_DAYS)
    requests = {
        "request": np.arange(len(users)),
        "user_id": users,
        "time_ms": np.tile(START_MS + np.arange(NUM_DAYS) * DAY_MS, 13),
        "item_id": pa.array([[1, 2]] * len(users), pa.list_(pa.int64())),
        "label_save": pa.array([[1, None]] * len(users), pa.list_(pa.int8())),
    }
    table = pa.table(requests)
    with_rows = layout.with_rows("requests", users)
    layout_module.write_buckets(table, with_rows.offsets["requests"], snapshot / "requests.parquet")
    with_rows.write(snapshot)
    (snapshot / MANIFEST).unlink()
    write_manifest(snapshot, "dataset", {"name": dataset.name, "source": {}})


def expected(old: Dataset, gone: set[int], cutoff_ms: int) -> list[tuple[int, int]]:
    rows = old.read_events(["user_id", "time_ms"]).to_pylist()
    return [(row["user_id"], row["time_ms"]) for row in rows
            if row["user_id"] not in gone and row["time_ms"] >= cutoff_ms]  # fmt: skip


def check_everything(old: Dataset, new: Dataset, gone: set[int], cutoff_ms: int) -> None:
    """Every file of the new snapshot is that of the old one without these users and times."""
    kept = expected(old, gone, cutoff_ms)
    events = new.read_events()
    assert list(zip(events["user_id"].to_pylist(), events["time_ms"].to_pylist(), strict=True)) == kept
    assert events.schema.equals(old.read_events().schema)
    features = pq.read_table(new.path / "features.parquet")
    assert list(zip(features["copy_of_user"].to_pylist(), features["copy_of_time"].to_pylist(), strict=True)) == kept
    users = new.read_users()
    assert gone.isdisjoint(users["user_id"].to_pylist())
    assert {112, 113, 114} - gone <= set(users["user_id"].to_pylist()), "known by the file of attributes alone"
    history = new.read_history("user")
    assert history is not None
    assert set(history["user_id"].to_pylist()) == set(users["user_id"].to_pylist())
    requests = pq.read_table(new.path / "requests.parquet")
    assert gone.isdisjoint(requests["user_id"].to_pylist())
    assert min(requests["time_ms"].to_pylist()) >= cutoff_ms
    left = [(u, t) for u in range(99, 112) for t in range(START_MS, START_MS + NUM_DAYS * DAY_MS, DAY_MS)
            if u not in gone and t >= cutoff_ms]  # fmt: skip
    assert requests.num_rows == len(left)
    impressions = new.read_impressions()
    assert impressions is not None
    assert set(impressions["request"].to_pylist()) == {*events["request"].to_pylist(), 5}
    report = check_dataset(new.path, now_ms=START_MS + 100 * DAY_MS)
    assert {finding.rule for finding in report.findings} <= {"unseen-user"}, report.findings
    for bucket in range(new.layout.num_buckets):
        first, last = new.layout.rows_of("requests", bucket)
        owners = new.layout.buckets_of(requests["user_id"].to_numpy()[first:last])
        assert (owners == bucket).all(), "requests lie in the bucket of their user"


def test_old_events_and_forgotten_users_go_together(folder: Path) -> None:
    old = open_dataset(folder)
    assert old.layout.num_buckets > 3
    # The first and the last user, one in the middle, one without events and one whom nobody knows.
    gone = {100, 105, 111, 112, 99, 7}
    add_forgotten(folder, gone)
    result = retain(old, days=5.5)
    new = open_dataset(folder)
    assert result.path == new.path != old.path
    assert result.cutoff_ms is not None
    check_everything(old, new, gone, result.cutoff_ms)
    assert result.num_events_removed == old.num_events - new.num_events > 0
    assert (result.num_forgotten_removed, result.num_users_removed) == (5, 4), "one had requests alone"
    assert new.statistics["num_events"] == new.num_events == len(expected(old, gone, result.cutoff_ms))
    assert new.read_truth() is None, "the world no longer tells which event is which"
    assert new.manifest["retention"]["from"] == old.path.name
    assert open_dataset(old.path).num_events == old.num_events, "the old snapshot is as it was"
    assert retain(new, days=5.5).path == new.path, "nothing more to leave out"


def test_only_forgotten_users(folder: Path) -> None:
    old = open_dataset(folder)
    add_forgotten(folder, [103])
    result = retain(old)
    new = open_dataset(folder)
    assert result.cutoff_ms is None
    check_everything(old, new, {103}, 0)
    assert new.read_truth() == {"seed": 1}
    history = new.read_history("user")
    assert history is not None and history.num_rows == 28


def test_versions_and_items_after_a_cutoff(folder: Path) -> None:
    old = open_dataset(folder)
    retain(old, days=1.5)
    new = open_dataset(folder)
    assert set(new.read_users()["user_id"].to_pylist()) == set(range(100, 115)), "all have a request left"
    history = new.read_history("user")
    assert history is not None
    # Of the two versions only the later can be seen after the cutoff.
    assert set(history["valid_from_ms"].to_pylist()) == {START_MS + 5 * DAY_MS}
    items = {row["item_id"]: row for row in new.read_items().to_pylist()}
    assert len(items) == 8 and sum(row["num_events"] for row in items.values()) == new.num_events
    assert items[7]["num_events"] == 0 and items[7]["first_ms"] is None
    assert new.layout.num_buckets < old.layout.num_buckets, "small buckets are joined"


def test_a_user_of_whom_nothing_is_left_goes_as_a_whole(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    # 1 stays active, 2 was active, 3 was shown something lately, 4 was shown something long ago, 5 is only listed.
    events = [(1, 7, "click", "home", START_MS + day * DAY_MS) for day in (0, 9)]
    events += [(user, 7, "click", "home", START_MS) for user in (2, 3)]
    listed = pa.table({"user": [4, 5], "country": ["de", "fr"]})
    folder = make_dataset(tmp_path, events, impressions=shown_to([3, 4], [9, 0]), user_attributes=listed)
    result = retain(open_dataset(folder), days=5)
    users = {row["user_id"]: row["num_events"] for row in open_dataset(folder).read_users().to_pylist()}
    assert users == {1: 1, 3: 0, 5: 0}
    assert (result.num_users_removed, result.num_events_removed) == (2, 3)


def test_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    old = open_dataset(folder)
    assert retain(old).path == old.path
    assert retain(old, days=100).path == old.path
    for days in (0, -1, 1e300, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="--days"):
            retain(old, days=days)
    add_forgotten(folder, range(100, 112))
    with pytest.raises(DataError, match="no event of .* would remain"):
        retain(old)
    assert open_dataset(folder).path == old.path
    assert not list(folder.glob(".*"))


def test_a_file_that_may_hold_users_is_not_passed_on(folder: Path) -> None:
    old = open_dataset(folder)
    (old.path / "more.parquet").write_bytes(b"")
    (old.path / MANIFEST).unlink()
    write_manifest(old.path, "dataset", {"name": old.name, "source": {}})
    add_forgotten(folder, [100])
    with pytest.raises(DataError, match="more.parquet may hold users"):
        retain(open_dataset(folder))


def shown_to(users: list[int], days: list[int]) -> pa.Table:
    """One impression of item 7 per user and day."""
    nothing = pa.array([0] * len(users), pa.int32())
    times = [START_MS + day * DAY_MS for day in days]
    requests = list(range(1, len(users) + 1))
    columns = {
        "user_id": users,
        "time_ms": times,
        "request": requests,
        "position": nothing,
        "item_id": [7] * len(users),
    }
    return pa.table(columns)


def test_users_and_times_that_only_impressions_have(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    shown = shown_to([1, 3, 3], [-20, 0, 0])
    folder = make_dataset(tmp_path, [(1, 7, "click", "home", START_MS)], impressions=shown)
    add_forgotten(folder, [3])
    assert remains_in(open_dataset(folder).path, read_forgotten(folder)).num_users == 1
    assert retain(open_dataset(folder)).num_forgotten_removed == 1
    left = open_dataset(folder).read_impressions()
    assert left is not None and left["request"].to_pylist() == [1]
    retain(open_dataset(folder), days=5)
    left = open_dataset(folder).read_impressions()
    assert left is not None and left.num_rows == 0


def test_requests_of_a_bucket_without_events_move_to_the_one_that_owns_them() -> None:
    tables = [pa.table({"user_id": users}) for users in ([1, 2, 5], [], [6, 9, 9], [9, 30])]
    nothing = pa.table({"user_id": pa.array([], pa.int64())})
    typed = [table.cast(nothing.schema) for table in tables]
    cut = [one["user_id"].to_pylist() for one in retention._cut(iter(typed), np.array([5, 9, 20, 40]), nothing)]
    assert cut == [[1, 2], [5, 6], [9, 9, 9], [30], []]
    layout = Layout(np.array([0, 5, 9, 20, 40]), {"events": np.zeros(6, dtype=np.int64)})
    assert layout.buckets_of(np.array([1, 5, 9, 30])).tolist() == [0, 1, 2, 3]


def run_of(runs: Path, name: str, dataset: Any, snapshot: str | None, status: str | None) -> Path:
    run = runs / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"data": {"dataset": str(dataset)}}))
    if snapshot is not None:
        step = run / "checkpoints" / "step-00000002"
        step.mkdir()
        (step / "state.json").write_text(json.dumps({"lineage": {"dataset": str(dataset), "snapshot": snapshot}}))
        (run / "checkpoints" / "latest").symlink_to(step.name)
    if status is not None:
        (run / "STATUS").write_text(status + "\n")
    return run


def test_what_an_unfinished_run_needs_is_kept(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    first = open_dataset(folder).path
    add_forgotten(folder, [100])
    second = retain(open_dataset(folder)).path
    add_forgotten(folder, [101])
    third = retain(open_dataset(folder)).path
    for snapshot in (first, second, third):
        place = index_folder(snapshot)
        assert place is not None
        (place / "settings").mkdir(parents=True)
    done = run_of(runs, "a", folder, first.name, "done")
    (runs / "latest").symlink_to(done.name)
    run_of(runs, "b", folder, second.name, "failed: no memory")
    assert snapshots_in_use(folder, runs) == {second.name: "b"}
    result = prune(folder, runs)
    assert (result.removed, result.kept) == ([first.name], {second.name: "b"})
    assert not first.exists() and second.exists() and open_dataset(folder).path == third
    assert {path.name for path in (folder / INDEX).iterdir()} == {second.name, third.name}
    state = runs / "b" / "checkpoints" / "latest" / "state.json"
    state.write_text(json.dumps({"lineage": {"snapshot": "of another dataset", "judged_snapshot": second.name}}))
    assert second.name in snapshots_in_use(folder, runs), "what judges a run is needed too"
    (runs / "b" / "STATUS").write_text("done\n")
    assert prune(folder, runs).removed == [second.name]
    assert read_forgotten(folder).user_ids.tolist() == [100, 101], "the list outlives the snapshots"


def test_a_link_in_place_of_the_indexes_is_not_followed(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "20200101T000000Z-01234567"
    other.mkdir(parents=True)
    (folder / INDEX).symlink_to(other.parent)
    (tmp_path / "runs").mkdir()
    prune(folder, tmp_path / "runs")
    assert other.exists()
    (folder / INDEX).unlink()
    shutil.copytree(other.parent, folder / INDEX)
    prune(folder, tmp_path / "runs")
    assert not list((folder / INDEX).iterdir()), "there is no such snapshot: it was removed by hand, say"


@pytest.mark.parametrize("named", ["{folder}", "{folder}/latest", "datasets/gone"])
def test_a_run_that_does_not_say_what_it_needs_stops_the_removal(folder: Path, tmp_path: Path, named: str) -> None:
    run_of(tmp_path / "runs", "a", named.format(folder=folder), None, None)
    with pytest.raises(UsageError, match="does not say which snapshot"):
        prune(folder, tmp_path / "runs")


def test_a_run_of_another_dataset_is_of_no_concern(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "other").mkdir()
    run_of(runs, "a", tmp_path / "other", None, "running")
    assert snapshots_in_use(folder, runs) == {}
    with pytest.raises(UsageError, match="not a folder of runs"):
        snapshots_in_use(folder, tmp_path / "nowhere")
    (runs / "b").mkdir()
    (runs / "b" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="b is unfinished"):
        snapshots_in_use(folder, runs)


def test_a_run_whose_state_makes_no_sense_is_named(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "1_x" / "checkpoints" / "latest"
    checkpoint.mkdir(parents=True)
    (tmp_path / "runs" / "1_x" / "config.json").write_text("{}")
    for state in ("[]", "{}", '{"lineage": 5}', '{"lineage": {"snapshot": 5}}'):
        (checkpoint / "state.json").write_text(state)
        with pytest.raises(CorruptFileError, match=r"state\.json is malformed"):
            prune(folder, tmp_path / "runs")
