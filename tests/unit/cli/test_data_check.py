from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Program = Callable[..., Any]
START_MS = 1_700_000_000_000


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    events = [(user, item, "click", "home", START_MS + item) for user in range(5) for item in range(4)]
    return make_dataset(tmp_path, events)


def test_a_sound_dataset(tackboard: Program, dataset: Path) -> None:
    answer = tackboard("data", "check", dataset)
    assert answer.code == 0
    assert answer.out.endswith(": 20 events, 5 users, 4 items\n0 errors, 0 warnings\n")
    assert tackboard("data", "check", dataset, "--json").json()["findings"] == []


def test_warnings_alone_are_no_failure(tackboard: Program, make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, [(1, 7, "click", "home", START_MS)] * 2, received_ms=[START_MS - 1] * 2)
    answer = tackboard("data", "check", folder)
    assert answer.code == 0
    assert "warning  events.parquet: 1 row repeats user, item, action and time of a row before it (row 1)" in answer.out
    assert "warning  events.parquet: 2 rows were received before they happened (row 0, 1)" in answer.out
    assert "0 errors, 2 warnings; rows are counted from 0" in answer.out


def test_errors_end_with_3_and_at_most_three_lines(tackboard: Program, dataset: Path, tmp_path: Path) -> None:
    snapshot = Path(shutil.copytree((dataset / "latest").resolve(), tmp_path / "broken"))
    (snapshot / "items.parquet").write_bytes(b"")
    answer = tackboard("data", "check", snapshot)
    assert answer.code == 3
    assert "error    items.parquet: " in answer.out
    assert 1 <= len(answer.err.splitlines()) <= 3 and "items.parquet" in answer.err
    result = tackboard("data", "check", snapshot, "--json").json()
    assert result["num_errors"] == 2
    assert result["findings"][0].keys() == {"rule", "severity", "file", "count", "rows", "wrong", "fix"}


def test_no_dataset(tackboard: Program, tmp_path: Path) -> None:
    answer = tackboard("data", "check", tmp_path / "nothing")
    assert answer.code == 3 and "holds no dataset" in answer.err
