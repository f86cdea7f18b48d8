"""`tackboard data label`: a new snapshot, told in a few lines or one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.data.requests import read_requests
from tackboard.events.dataset import open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

Program = Callable[..., Any]


@pytest.fixture
def world(tmp_path: Path) -> Path:
    write_world(WorldConfig(num_users=20, num_items=40, num_topics=5, median_events=8.0), tmp_path, "small")
    return tmp_path / "small"


def test_the_summary_says_what_came_of_it(tackboard: Program, world: Path) -> None:
    answer = tackboard("data", "label", world, "--label", "save=7d", "--label", "click=30m", "--negatives", "2")
    assert answer.code == 0, answer.err
    table = read_requests(open_dataset(world))
    lines = answer.out.splitlines()
    assert lines[0].split() == ["requests", f"{table.num_rows:,}"]
    clicks = sum(value == 1 for values in table["label_click"].to_pylist() for value in values)
    assert lines[2].startswith(f"click        {clicks:>12,}  positive, ")
    assert any("negatives, by --negatives; those kept weigh more" in line for line in lines)
    assert lines[-1] == f"dataset      {(world / 'latest').resolve()}"


def test_one_json_object(tackboard: Program, world: Path) -> None:
    answer = tackboard("data", "label", world, "--label", "save=7d", "--seed", "3", "--json")
    content = answer.json()
    assert Path(content["dataset"]) == (world / "latest").resolve()
    assert content["rules"] == {
        "labels": [{"action": "save", "window_ms": 604_800_000}],
        "shown": None,
        "negatives": None,
        "seed": 3,
    }
    counts = content["counts"]
    label = counts["labels"]["save"]
    assert label["positives"] + label["negatives"] + label["not_known_yet"] == counts["candidates"]
    assert tackboard("data", "label", world, "--label", "save=7d", "--seed", "3", "--json").json() == content


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--label", "save=7x"], 2, "the window '7x'"),
        (["--label", "save=0d"], 2, "the window '0d'"),
        (["--label", "save"], 2, "allowed: ACTION=WINDOW"),
        (["--label", "svae=7d"], 2, "did you mean save?"),
        (["--label", "save=7d", "--label", "save=1d"], 2, "two labels of the action save"),
        (["--label", "save=7d", "--negatives", "0"], 2, "--negatives 0"),
        (["--label", "save=7d", "--shown", "view"], 2, "has the action 'view'"),
        (["--label", "save=7d", "--shown", "save"], 2, "everything shown would be positive"),
        ([], 2, "--label"),
    ],
)
def test_what_is_refused(tackboard: Program, world: Path, options: list[str], code: int, says: str) -> None:
    before = sorted(path.name for path in world.iterdir())
    answer = tackboard("data", "label", world, *options)
    assert (answer.code, says in answer.err) == (code, True), answer.err
    assert len(answer.err.splitlines()) <= 3
    assert sorted(path.name for path in world.iterdir()) == before


def test_a_dataset_without_impressions(tackboard: Program, tiny_dataset: Path) -> None:
    answer = tackboard("data", "label", tiny_dataset, "--label", "save=7d")
    assert answer.code == 3
    assert "have no request" in answer.err


def test_from_files_to_labels(tackboard: Program, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("who,what,when,act,call\nann,lamp,2024-05-01T10:05:00Z,click,r1\n")
    rows = [f"ann,{item},2024-05-01T10:00:00Z,r1,{place}" for place, item in enumerate(("sofa", "lamp"))]
    (tmp_path / "shown.csv").write_text("\n".join(["who,what,when,call,position", *rows]) + "\n")
    options = {"--user": "who", "--item": "what", "--time": "when", "--action": "act", "--request": "call"}
    words = [word for pair in options.items() for word in pair]
    answer = tackboard("init", tmp_path / "log.csv", *words, "--impressions", tmp_path / "shown.csv", "--name", "shop",
                       "--out", tmp_path, "--recipe", tmp_path / "recipe.py")  # fmt: skip
    assert answer.code == 0, answer.err
    assert "impressions             2" in answer.out
    assert tackboard("data", "label", tmp_path / "shop", "--label", "click=10m").code == 0
    row = read_requests(open_dataset(tmp_path / "shop")).to_pylist()[0]
    assert (row["position"], row["label_click"]) == ([0, 1], [None, 1])
    # An item that was only shown is in the catalogue: nothing is wrong with the data.
    assert tackboard("data", "check", tmp_path / "shop").code == 0
