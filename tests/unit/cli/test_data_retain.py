from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.dataset import open_dataset
from tackboard.events.forgetting import add_forgotten

Program = Callable[..., Any]
DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    rows = [(user, 7, "click", "home", START_MS + day * DAY_MS) for user in (1, 2, 3) for day in range(10)]
    return make_dataset(tmp_path, rows)


def test_old_events_go_and_older_snapshots_with_them(tackboard: Program, dataset: Path, tmp_path: Path) -> None:
    old = open_dataset(dataset).path
    add_forgotten(dataset, [2])
    answer = tackboard("data", "retain", dataset, "--days", "3.5")
    assert answer.code == 0
    new = open_dataset(dataset)
    assert answer.out == (
        "left out  22 events and 1 users; 1 users were forgotten\n"
        "          older snapshots still hold them; --prune removes those that no unfinished run needs\n"
        f"dataset   {new.path}\n"
    )
    assert (new.num_events, new.num_users) == (8, 2)
    (tmp_path / "runs").mkdir()
    result = tackboard("data", "retain", dataset, "--prune", "--runs", tmp_path / "runs", "--json").json()
    assert (result["removed"], result["kept"], result["num_events_removed"]) == ([old.name], {}, 0)
    assert Path(result["path"]) == new.path and not old.exists()


def test_nothing_is_written_where_nobody_knows_what_may_be_removed(
    tackboard: Program, dataset: Path, tmp_path: Path
) -> None:
    old = open_dataset(dataset).path
    answer = tackboard("data", "retain", dataset, "--days", "2", "--prune", "--runs", tmp_path / "nowhere")
    assert answer.code == 2 and "is no folder of runs" in answer.err
    assert open_dataset(dataset).path == old
    assert tackboard("data", "retain", dataset, "--days", "0").code == 2
    assert tackboard("data", "retain", old / "nothing").code == 3
