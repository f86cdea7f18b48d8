"""The commands about data, one after the other on one dataset, as somebody who runs it would type them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.manifest import MANIFEST, read_manifest, write_manifest
from tackboard.events.dataset import open_dataset

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

Program = Callable[..., Answer]
DATASET = "datasets/tiny"
USER = 7


@pytest.fixture
def place(workspace: Path, tmp_path: Path) -> Path:
    """A copy of the workspace that may be changed."""
    return Path(shutil.copytree(workspace, tmp_path / "place", symlinks=True))


def told(program: Program, *arguments: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    """The JSON object that a command prints."""
    answer = program(*arguments, "--json", cwd=cwd)
    assert answer.code == code, answer.err
    result: dict[str, Any] = json.loads(answer.out.splitlines()[-1])
    return result


def test_check_stats_and_drift_of_a_world(tackboard: Program, workspace: Path, tmp_path: Path) -> None:
    report = told(tackboard, "data", "check", DATASET, cwd=workspace)
    assert (report["num_errors"], report["num_users"]) == (0, 60)
    page = tmp_path / "page.html"
    stats = told(tackboard, "data", "stats", DATASET, "--out", str(page), cwd=workspace)
    assert stats["num_events"] == report["num_events"] == sum(stats["hours"]) == sum(stats["days"]["events"])
    assert "<svg" in page.read_text()
    drift = told(tackboard, "data", "drift", DATASET, DATASET, "--threshold", "0", cwd=workspace)
    assert {one["jensen_shannon_bits"] for one in drift["distances"]} == {0.0}


def test_a_user_is_forgotten_and_nothing_that_is_made_later_holds_them(tackboard: Program, place: Path) -> None:
    before = open_dataset(place / DATASET)
    forgotten = told(tackboard, "data", "forget", "--user", str(USER), "--data", DATASET, cwd=place)
    assert forgotten["datasets"][0]["snapshots"][0]["num_users"] == 1
    spec = str(Path(__file__).parents[2] / "examples" / "features.py")
    refused = tackboard("features", "backfill", spec, "--data", DATASET, cwd=place)
    assert refused.code == 3 and "still holds 1 user on the list of forgotten users" in refused.err
    assert len(refused.err.splitlines()) <= 3 and "tackboard data retain" in refused.err
    retained = told(tackboard, "data", "retain", DATASET, "--prune", cwd=place)
    assert (retained["num_forgotten_removed"], retained["removed"]) == (1, [before.path.name])
    assert not before.path.exists()
    assert told(tackboard, "data", "check", DATASET, cwd=place)["findings"] == []
    assert told(tackboard, "features", "backfill", spec, "--data", DATASET, cwd=place)["num_rows"] < before.num_events
    made = told(tackboard, "data", "label", DATASET, "--label", "save=7d", cwd=place)
    assert Path(made["dataset"]).is_dir()
    assert told(tackboard, "data", "check", DATASET, cwd=place)["findings"] == []
    newest = open_dataset(place / DATASET)
    assert newest.num_users == 59
    for path in sorted(newest.path.glob("*.parquet")):
        table = pq.read_table(path)
        if "user_id" in table.column_names:
            assert USER not in table["user_id"].to_pylist(), path
    again = told(tackboard, "data", "synth", "--name", "tiny", "--set", "num_users=60", "--set", "num_items=80",
                 "--set", "median_events=12", "--set", "max_events=30", cwd=place)  # fmt: skip
    assert again["statistics"]["num_users"] == 59
    assert tackboard("train", "recipe.py:recipe", cwd=place).code == 0


def test_retention_with_every_file_a_snapshot_can_have(tackboard: Program, place: Path) -> None:
    spec = str(Path(__file__).parents[2] / "examples" / "features.py")
    told(tackboard, "features", "backfill", spec, "--data", DATASET, cwd=place)
    told(tackboard, "data", "label", DATASET, "--label", "save=7d", "--label", "share=1d", cwd=place)
    whole = open_dataset(place / DATASET)
    told(tackboard, "data", "forget", "--user", str(USER), "--data", DATASET, cwd=place)
    told(tackboard, "data", "retain", DATASET, "--days", "70", cwd=place)
    report = told(tackboard, "data", "check", DATASET, cwd=place)
    assert report["num_errors"] == 0, report
    kept = open_dataset(place / DATASET)
    assert 0 < kept.num_events < whole.num_events
    stats = told(tackboard, "data", "stats", DATASET, cwd=place)
    assert set(stats["requests"]["labels"]) == {"save", "share"}
    assert stats["files"]["features.parquet"]["num_rows"] == kept.num_events
    assert tackboard("verify", DATASET, cwd=place).code == 0
    assert tackboard("train", "recipe.py:recipe", cwd=place).code == 0
    drift = told(tackboard, "data", "drift", str(whole.path), DATASET, "--threshold", "0", cwd=place, code=3)
    assert drift["num_new"] == kept.num_events


def test_a_snapshot_that_a_run_needs_is_not_removed(tackboard: Program, place: Path) -> None:
    old = open_dataset(place / DATASET).path
    run = (place / "runs" / "latest").resolve()
    (run / "STATUS").write_text("preempted\n")
    told(tackboard, "data", "forget", "--user", str(USER), "--data", DATASET, cwd=place)
    answer = tackboard("data", "retain", DATASET, "--prune", cwd=place)
    assert answer.code == 0
    assert f"{old.name}: the run {run.name} is unfinished and needs it" in answer.out
    assert old.is_dir()
    (run / "STATUS").write_text("done\n")
    assert told(tackboard, "data", "retain", DATASET, "--prune", cwd=place)["removed"] == [old.name]


@pytest.mark.parametrize(
    ("name", "says"),
    [("truncated", "events.parquet"), ("missing", "items.parquet"), ("typed", "time_ms is"), ("sealed", "MANIFEST")],
)
def test_a_broken_dataset_is_told_in_three_lines(tackboard: Program, place: Path, name: str, says: str) -> None:
    snapshot = open_dataset(place / DATASET).path
    events = snapshot / "events.parquet"
    if name == "truncated":
        events.write_bytes(events.read_bytes()[:1000])
    elif name == "missing":
        (snapshot / "items.parquet").unlink()
    elif name == "typed":
        table = pq.read_table(events)
        index = table.column_names.index("time_ms")
        pq.write_table(table.set_column(index, "time_ms", table["time_ms"].cast(pa.float64())), events)
        noted = {key: read_manifest(snapshot)[key] for key in ("name", "source")}
        (snapshot / MANIFEST).unlink()
        write_manifest(snapshot, "dataset", noted)
    else:
        (snapshot / MANIFEST).write_text((snapshot / MANIFEST).read_text().replace("tiny", "tidy"))
    answer = tackboard("data", "check", DATASET, cwd=place)
    assert answer.code == 3
    assert 1 <= len(answer.err.splitlines()) <= 3 and "Traceback" not in answer.err
    assert says in answer.out and "bug" not in answer.err
