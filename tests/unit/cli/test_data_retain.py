from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import add_forgotten

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
        "left out  22 events and 1 user; forgotten: 1 user\n"
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


def test_a_wrong_clock_costs_nothing(tackboard: Program, make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    far = 4_000_000_000_000
    rows = [(1, 7, "click", "home", START_MS + day * DAY_MS) for day in range(10)]
    dataset = make_dataset(tmp_path, [*rows, (2, 7, "click", "home", far)])
    answer = tackboard("data", "retain", dataset, "--days", "4")
    assert answer.code == 0
    assert "left out  5 events and 0 users" in answer.out
    assert "kept      1 event in the future; `data check` names the rows" in answer.out
    assert open_dataset(dataset).read_events(["time_ms"])["time_ms"].to_pylist() == [
        *(START_MS + day * DAY_MS for day in range(5, 10)),
        far,
    ]
    assert tackboard("data", "retain", dataset, "--days", "4", "--json").json()["num_future"] == 1


def test_a_log_of_the_future_is_refused(tackboard: Program, make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [(2, 7, "click", "home", 4_000_000_000_000)])
    answer = tackboard("data", "retain", dataset, "--days", "4")
    assert answer.code == 3 and "every time_ms" in answer.err


@pytest.mark.parametrize("days", ["inf", "nan", "-1", "0", "1e300"])
def test_days_that_cannot_be(tackboard: Program, dataset: Path, days: str) -> None:
    answer = tackboard("data", "retain", dataset, f"--days={days}")
    assert answer.code == 2 and "--days" in answer.err
