"""The label job: a new snapshot whose requests lie in the buckets of their users, or the old one as it was."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tackboard.core import files
from tackboard.core.errors import DataError, UsageError
from tackboard.core.keyed_random import uniform
from tackboard.core.manifest import verify_manifest
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import REQUESTS, Labelled, label_dataset, read_labels, read_requests
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.layout import RowReader
from tackboard.events.staging import derive_snapshot
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

CONFIG = LabelConfig(labels=(Label("click", 1_800_000), Label("save", 7 * 86_400_000)))
WORLD = WorldConfig(num_users=40, num_items=80, num_topics=5, median_events=12.0, max_events=30)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world of several buckets."""
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 100)
    write_world(WORLD, tmp_path, "small")
    return tmp_path / "small"


def label(folder: Path, config: LabelConfig = CONFIG) -> Labelled:
    return label_dataset(open_dataset(folder), config, quiet=True)


def shop(root: Path, num_users: int = 20, **changes: Any) -> Path:
    """A log of views, clicks and saves; three views a request, requests in text, some actions late or astray."""
    rows: list[tuple[Any, ...]] = []
    for user in range(num_users):
        for number in range(6):
            begin = 1_000_000 * (number + 1) + 400 * user
            draw = uniform(5, user, number, np.arange(8))
            for slot in range(3):
                rows.append((user, 10 * number + slot, "view", begin + slot, f"r{user}-{number}", slot))
            request = None if draw[0] < 0.1 else f"r{user}-{number if draw[1] < 0.9 else 9}"
            rows.append((user, 10 * number + int(4 * draw[2]), "click", begin + int(3000 * draw[3]), request, None))
    user, item, action, time_ms, request, position = (list(column) for column in zip(*rows, strict=True))
    columns: dict[str, Any] = {
        "user": user,
        "item": item,
        "action": pa.array(action).dictionary_encode(),
        "surface": pa.array(["home"] * len(rows)).dictionary_encode(),
        "time_ms": time_ms,
        "received_ms": time_ms,
        "order": list(range(len(rows))),
        "request": pa.array(request),
        "position": pa.array(position, type=pa.int32()),
    }
    write_dataset(root, "shop", pa.table({**columns, **changes}))
    return root / "shop"


VIEWED = LabelConfig(labels=(Label("click", 1500),), shown="view")


def test_a_world_is_labelled_as_it_was_made(world: Path) -> None:
    result = label(world)
    dataset = open_dataset(world)
    assert dataset.path == result.path
    impressions = dataset.read_impressions()
    assert impressions is not None
    done = dataset.read_events(["request", "item_id", "action", "user_id", "time_ms", "surface"]).to_pylist()
    actions = {(row["request"], row["item_id"]): row["action"] for row in done}
    of_request = {row["request"]: row for row in done}
    shown: dict[int, list[tuple[int, int]]] = {}
    for row in impressions.to_pylist():
        shown.setdefault(row["request"], []).append((row["position"], row["item_id"]))
    rows = read_requests(dataset).to_pylist()
    assert len(rows) == len(shown) == result.counts.requests
    assert sum(len(row["item_id"]) for row in rows) == impressions.num_rows == result.counts.candidates
    for row in rows:
        event = of_request[row["request"]]
        assert list(zip(row["position"], row["item_id"], strict=True)) == sorted(shown[row["request"]])
        assert (row["user_id"], row["time_ms"], row["surface"]) == (
            event["user_id"],
            event["time_ms"],
            event["surface"],
        )
        assert set(row["weight"]) == {1.0}
        for rule in CONFIG.labels:
            closed = row["time_ms"] + rule.window_ms < result.end_ms
            for item, value in zip(row["item_id"], row[rule.column], strict=True):
                engaged = actions.get((row["request"], item)) == rule.action
                assert value == (1 if engaged else 0 if closed else None)


def test_requests_lie_in_the_buckets_of_their_users(world: Path) -> None:
    label(world)
    dataset = open_dataset(world)
    layout, table = dataset.layout, read_requests(dataset)
    assert layout.num_buckets > 3
    assert layout.offsets["requests"][-1] == table.num_rows
    reader = RowReader(dataset.path / REQUESTS)
    for bucket in range(layout.num_buckets):
        users = reader.read([layout.rows_of("requests", bucket)], ["user_id"])["user_id"].to_numpy()
        assert len(users) and (layout.buckets_of(users) == bucket).all()
    reader.close()
    assert pq.ParquetFile(dataset.path / REQUESTS).num_row_groups == layout.num_buckets
    keys = [tuple(row.values()) for row in table.select(["user_id", "time_ms", "request"]).to_pylist()]
    assert keys == sorted(keys)


def test_buckets_do_not_show_in_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(VIEWED, negatives=1)
    whole = label(shop(tmp_path / "whole"), config)
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 30)
    cut = label(shop(tmp_path / "cut"), config)
    tables = [read_requests(open_dataset(result.path)) for result in (whole, cut)]
    assert tables[0].to_pylist() == tables[1].to_pylist()
    assert whole.counts == cut.counts
    counts = whole.counts.labels["click"]
    everything = dataclasses.asdict(counts)
    never = {"actions_repeated", "actions_early"}
    assert {name for name, number in everything.items() if not number} == never
    assert sum(everything[name] for name in everything if name == "positives" or name.startswith("actions")) == 120


@pytest.mark.parametrize("rows_per_part", [1, 40])
def test_parts_do_not_show_in_the_labels(world: Path, monkeypatch: pytest.MonkeyPatch, rows_per_part: int) -> None:
    expected = label(world)
    table = read_requests(open_dataset(world))
    shutil.rmtree(expected.path)
    (world / "latest").unlink()
    (world / "latest").symlink_to(next(world.glob("[0-9]*")).name)
    monkeypatch.setattr("tackboard.events.impressions.ROWS_PER_PART", rows_per_part)
    found = label(world)
    assert pq.ParquetFile(found.path / REQUESTS).num_row_groups > open_dataset(world).layout.num_buckets
    assert read_requests(open_dataset(world)).to_pylist() == table.to_pylist()
    assert found.counts == expected.counts
    assert open_dataset(world).layout.offsets["requests"][-1] == table.num_rows


def test_rules_and_counts_are_noted(world: Path) -> None:
    result = label(world, dataclasses.replace(CONFIG, negatives=2, seed=4))
    content = json.loads((result.path / "labels.json").read_text())
    assert content["labels"] == {"click": 1_800_000, "save": 604_800_000}
    assert (content["shown"], content["negatives"], content["seed"]) == (None, 2, 4)
    assert content["counts"]["negatives_left_out"] > 0
    assert read_labels(result.path) == result
    dataset = open_dataset(world)
    assert content["end_ms"] == max(dataset.read_events(["received_ms"])["received_ms"].to_pylist())
    assert set(content["inputs"]) == {"events.parquet", "impressions.parquet"}


def test_the_same_rules_again_do_nothing(world: Path) -> None:
    first = label(world)
    before = sorted(os.listdir(world))
    assert label(world) == first
    assert sorted(os.listdir(world)) == before


def test_labels_of_other_events_are_made_again(tmp_path: Path) -> None:
    folder = shop(tmp_path)
    first = label(folder, VIEWED)
    dataset = open_dataset(folder)

    def correct(staging: Path) -> list[str]:
        events = dataset.read_events()
        unknown = pa.nulls(events.num_rows, pa.string())
        clicked = pc.equal(events["action"], "click")
        requests = pc.if_else(clicked, unknown, events["request"])
        place = events.column_names.index("request")
        pq.write_table(events.set_column(place, "request", requests), staging / "events.parquet")
        return ["events.parquet"]

    derive_snapshot(dataset, "corrected", 1, replaced=("events.parquet",), fill=correct)
    second = label(folder, VIEWED)
    assert first.counts.labels["click"].positives > 0 == second.counts.labels["click"].positives
    assert second.counts.labels["click"].actions_without_request == 120


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    config = dataclasses.replace(VIEWED, negatives=1)
    first, second = (label(shop(tmp_path / name), config).path for name in ("a", "b"))
    for name in (REQUESTS, "labels.json", "layout.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]


def test_other_rules_replace_the_labels(world: Path) -> None:
    first = label(world)
    second = label(world, LabelConfig(labels=(Label("share", 1000),)))
    assert second.path != first.path
    assert [name for name in read_requests(open_dataset(world)).column_names if "label" in name] == ["label_share"]
    verify_manifest(first.path, "dataset")
    assert (first.path / "events.parquet").stat().st_ino == (second.path / "events.parquet").stat().st_ino


def test_a_snapshot_of_before_there_were_layouts(world: Path) -> None:
    old = open_dataset(world)
    (old.path / "layout.json").unlink()
    manifest = json.loads((old.path / "MANIFEST.json").read_text())
    from tackboard.core.manifest import write_manifest

    (old.path / "MANIFEST.json").unlink()
    write_manifest(old.path, "dataset", {key: manifest[key] for key in ("name", "source")})
    label(world)
    layout = open_dataset(world).layout
    assert layout.offsets["requests"][-1] == read_requests(open_dataset(world)).num_rows


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (LabelConfig(labels=(Label("clik", 5),), shown="view"), UsageError, "no event of shop has the action 'clik'"),
        (
            LabelConfig(labels=(Label("click", 5),), shown="vieww"),
            UsageError,
            "no event of shop has the action 'vieww'",
        ),
        (LabelConfig(labels=(Label("click", 5),)), DataError, "does not say what was shown"),
    ],
)
def test_what_is_refused_leaves_the_old_snapshot(
    tmp_path: Path, config: LabelConfig, error: type[Exception], says: str
) -> None:
    folder = shop(tmp_path)
    before = sorted(os.listdir(folder))
    with pytest.raises(error, match=says):
        label(folder, config)
    assert sorted(os.listdir(folder)) == before


def test_no_impression_that_can_be_used(tmp_path: Path) -> None:
    folder = shop(tmp_path, request=pa.nulls(480, pa.string()))
    with pytest.raises(DataError, match="has a request and a user") as refused:
        label(folder, VIEWED)
    assert refused.value.allowed == "without a request: 360; without a user: 0"
    assert len(os.listdir(folder)) == 2


def test_events_without_requests(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, [(1, 2, "click", "home", 5)])
    with pytest.raises(DataError, match="have no request"):
        label(folder, LabelConfig(labels=(Label("click", 5),)))


def test_an_older_snapshot_is_refused(world: Path) -> None:
    older = open_dataset(world)
    label(world)
    with pytest.raises(UsageError, match="is not the newest snapshot"):
        label_dataset(older, CONFIG, quiet=True)


def test_at_every_point_latest_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[str] = []
    folder = shop(tmp_path / "all", num_users=2)
    monkeypatch.setattr(files, "observer", points.append)
    expected = label(folder, VIEWED)
    monkeypatch.setattr(files, "observer", None)
    assert points[-1] == "latest:after-rename"
    fresh = shop(tmp_path / "fresh", num_users=2)
    for number in range(len(points)):
        folder = Path(shutil.copytree(fresh, tmp_path / str(number) / fresh.name, symlinks=True))
        old = folder.joinpath("latest").resolve()
        passed: list[str] = []

        def stop(point: str, number: int = number, passed: list[str] = passed) -> None:
            passed.append(point)
            if len(passed) == number + 1:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "observer", stop)
        with pytest.raises(OSError, match="No space left"):
            label(folder, VIEWED)
        monkeypatch.setattr(files, "observer", None)
        verify_manifest(folder.joinpath("latest").resolve(), "dataset")
        assert (folder.joinpath("latest").resolve() == old) == (points[number] != "latest:after-rename")
        assert not list(folder.glob(".*"))
        assert label(folder, VIEWED).counts == expected.counts
        assert len(list(folder.glob("[0-9]*"))) == 2, "what was complete is taken up, not made again"


def test_a_wrong_clock_does_not_end_the_log(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    rows = [(1, item, "view", "home", 1_700_000_000_000) for item in range(3)]
    rows += [(1, 0, "click", "home", 1_700_000_060_000), (2, 9, "click", "home", 4_000_000_000_000)]
    folder = make_dataset(tmp_path, rows, fields={"request": [1, 1, 1, 1, 2]})
    result = label(folder, LabelConfig(labels=(Label("click", 1_800_000),), shown="view"))
    assert result.end_ms == 1_700_000_060_000
    assert result.counts.events_in_future == 1
    count = result.counts.labels["click"]
    assert (count.positives, count.negatives, count.not_known_yet) == (1, 0, 2)


def test_a_dataset_without_labels(world: Path) -> None:
    assert read_labels(world / "latest") is None
    with pytest.raises(DataError, match="has no labelled requests"):
        read_requests(open_dataset(world))


@pytest.mark.slow
def test_a_million_impressions_in_seconds(tmp_path: Path) -> None:
    write_world(dataclasses.replace(WorldConfig(), num_users=4000), tmp_path, "large")
    started = time.process_time()
    result = label(tmp_path / "large", dataclasses.replace(CONFIG, negatives=3))
    assert result.counts.candidates + result.counts.negatives_left_out > 900_000
    assert time.process_time() - started < 20
