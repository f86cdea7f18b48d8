"""`tackboard evaluate`: the table for people and for machines, on the run's data or on other data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.rundir import RunDirectory

Program = Callable[..., Any]


@pytest.fixture
def run(trained_run: RunDirectory, tmp_path: Path) -> Path:
    """A copy of the trained run: evaluating writes into it."""
    shutil.copytree(trained_run.path, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_json_holds_every_row_and_is_kept_with_the_run(tackboard: Program, run: Path) -> None:
    answer = tackboard("evaluate", run, "--json")
    assert answer.code == 0, answer.err
    result = answer.json()
    assert [row["name"] for row in result["rows"]] == ["popularity", "item-to-item", "model"]
    assert set(result["rows"][0]) == {"name", "hr@1", "hr@5", "ndcg@1", "ndcg@5"}
    assert (result["num_users"], result["num_items"], result["filter_seen"]) == (14, 24, False)
    assert result["gap_closed"] is None  # no oracle for real data
    assert json.loads((run / "eval" / "metrics.json").read_text()) == result
    assert answer.err.count("ranking by") == 3


def test_the_table_for_people_says_the_protocol(tackboard: Program, run: Path) -> None:
    lines = tackboard("evaluate", run, "--filter-seen", "--max-users", "5").out.splitlines()
    assert lines[0].startswith("5 users, 24 items; leave-last-out, full catalogue")
    assert lines[1] == "items of the history are taken out"
    assert lines[2].split() == ["hr@1", "hr@5", "ndcg@1", "ndcg@5"]
    assert [line.split()[0] for line in lines[3:]] == ["popularity", "item-to-item", "model"]


def test_other_data_is_read_with_the_models_vocabulary(
    tackboard: Program, run: Path, tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    """Actions that sort before the known ones, and more of them: none may be taken for another."""
    log = [
        (user, item, action, "home", 10 * item)
        for user in range(3)
        for item, action in enumerate(["click", "aa", "save", "ab", "ac", "ad", "ae", "click"])
    ]
    other = make_dataset(tmp_path, log, name="other")
    answer = tackboard("evaluate", run, "--dataset", other, "--json")
    assert answer.code == 0, answer.err
    assert answer.json()["num_users"] == 3
    renamed = [
        (user, item, action.replace("a", "x") if len(action) == 2 else action, *rest)
        for user, item, action, *rest in log
    ]
    same = tackboard("evaluate", run, "--dataset", make_dataset(tmp_path, renamed, name="renamed"), "--json")
    assert same.json()["rows"] == answer.json()["rows"]


def test_mistakes(tackboard: Program, run: Path, tmp_path: Path) -> None:
    assert tackboard("evaluate", tmp_path / "absent").code == 3
    (run / "checkpoints" / "latest" / "state.json").write_text("{}")
    answer = tackboard("evaluate", run)
    assert answer.code == 3
    assert "state.json" in answer.err
    assert len(answer.err.splitlines()) <= 3
