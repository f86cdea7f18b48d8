"""The commands about data, one after the other on one dataset, as somebody who runs it would type them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

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
