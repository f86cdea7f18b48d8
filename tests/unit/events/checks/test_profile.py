from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.events.checks.profile import profile
from tackboard.events.dataset import open_dataset

DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
Make = Callable[..., Path]


def test_every_count_is_that_of_the_events(make_dataset: Make, tmp_path: Path) -> None:
    # (user, item, hours after the start)
    rows = [(1, 7, 0), (1, 7, 1), (1, 8, 25), (2, 7, 49), (3, 9, 49)]
    events = [(user, item, "click" if item == 7 else "save", "home", START_MS + hour * 3_600_000)
              for user, item, hour in rows]  # fmt: skip
    late = [0, 500, 30_000, 0, -1000]
    folder = make_dataset(
        tmp_path,
        events,
        received_ms=[time + more for (*_, time), more in zip(events, late, strict=True)],
        fields={"price": [1.0, None, 2.0, None, 3.0]},
        item_attributes=pa.table(
            {"item": [7, 8, 9, 10], "birth_ms": [0, START_MS, START_MS + DAY_MS, START_MS + DAY_MS]}
        ),
    )
    found = profile(open_dataset(folder))
    assert (found["num_events"], found["num_users"], found["num_items"], found["num_items_listed"]) == (5, 3, 3, 4)
    assert found["days"] == {"first": "2024-10-04", "day": [0, 1, 2], "events": [2, 1, 2]}
    assert (found["hours"][0], found["hours"][1], sum(found["hours"])) == (1, 4, 5)
    assert found["actions"] == {"click": pytest.approx(0.6), "save": pytest.approx(0.4)}
    assert {name: count for name, count in found["events_per_user"]["bins"].items() if count} == {"1": 2, "2 to 4": 1}
    assert (found["events_per_user"]["max"], found["events_per_user"]["mean"]) == (3, pytest.approx(5 / 3))
    assert (found["items"]["rank"], found["items"]["events"]) == ([1, 2, 3], [3, 1, 1])
    assert found["items"]["top"][0] == {"item": 7, "events": 3}
    gaps = {name: count for name, count in found["gap_s"]["bins"].items() if count}
    assert gaps == {"10 to 60 min": 1, "6 to 24 h": 1}
    lateness = {name: count for name, count in found["lateness_s"]["bins"].items() if count}
    assert lateness == {"0": 3, "under 1 s": 1, "10 to 60 s": 1}
    assert found["lateness_s"]["num_negative"] == 1
    assert found["gap_s"]["estimated"] is False
    assert found["catalogue"] == {"by": "birth_ms", "day": [0, 1], "items": [2, 4]}
    assert found["fields"] == {"price": {"type": "float", "missing_share": pytest.approx(0.4)}}
    assert found["requests"] is None
    files = found["files"]
    assert files["events.parquet"]["num_rows"] == 5
    assert 0 < sum(files["events.parquet"]["columns"].values()) < files["events.parquet"]["bytes"]
    assert set(files["events.parquet"]["columns"]) >= {"user_id", "time_ms", "price"}


def test_requests_and_labels(make_dataset: Make, tmp_path: Path) -> None:
    snapshot = open_dataset(make_dataset(tmp_path, [(1, 7, "click", "home", START_MS)])).path
    requests = {
        "request": [1, 2],
        "user_id": [1, 1],
        "time_ms": [START_MS, START_MS],
        "item_id": pa.array([[7, 8], [7]], pa.list_(pa.int64())),
        "label_save": pa.array([[1, 0], [None]], pa.list_(pa.int8())),
    }
    pq.write_table(pa.table(requests), snapshot / "requests.parquet")
    (snapshot / MANIFEST).unlink()
    write_manifest(snapshot, "dataset", {"name": "tiny", "source": {}})
    found = profile(open_dataset(snapshot))["requests"]
    assert (found["num_requests"], found["num_candidates"]) == (2, 3)
    assert found["labels"] == {"save": {"positive": 1, "negative": 1, "unknown": 1}}
    assert found["candidates_per_request"]["q50"] == 1.5
