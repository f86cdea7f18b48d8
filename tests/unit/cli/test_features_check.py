"""`tackboard features check`: a table of what compiles, a sentence about what does not; data, older sets on demand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.features.feature_set import load_features

Program = Callable[..., Any]
HEAD = "from tackboard.features.language import *\nitem = Item(price=Float())\nevents = Events()\n"


def write(folder: Path, features: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(f'{HEAD}features = FeatureSet("home", {features})\n')
    return path


def test_a_table_of_features(tackboard: Program, tmp_path: Path) -> None:
    answer = tackboard("features", "check", write(tmp_path, "count=events.count(), price=item.price"))
    assert answer.code == 0
    assert [line.split() for line in answer.out.splitlines()[:-1]] == [
        ["name", "type", "level", "place"],
        ["count", "int", "request", "mine.py:4"],
        ["price", "float?", "candidate", "mine.py:4"],
    ]
    assert answer.out.splitlines()[-1].startswith("feature set home, version 1, ")
    assert answer.out.endswith(": 2 features\n")


def test_every_place_that_holds_a_set(tackboard: Program, tmp_path: Path) -> None:
    source = write(tmp_path, "count=events.count()")
    features = load_features(str(source))
    for folder in ("bundle", "run/checkpoints/latest", "dataset/latest"):
        (tmp_path / folder).mkdir(parents=True)
        features.write(tmp_path / folder)
    (tmp_path / "empty").mkdir()
    for place in (f"{source}:features", "bundle", "bundle/features.json", "run", "dataset"):
        answer = tackboard("features", "check", tmp_path / place, "--json")
        assert answer.json()["hash"] == features.hash
    answer = tackboard("features", "check", tmp_path / "empty")
    assert answer.code == 2
    assert "empty holds no features.json" in answer.err


def test_json(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> None:
    path = write(tmp_path, 'version=2, count=events.count().described("All.")')
    answer = tackboard("features", "check", path, "--json", "--data", tiny_dataset).json()
    (feature,) = answer.pop("features")
    assert answer == {
        "name": "home",
        "version": 2,
        "hash": load_features(str(path)).hash,
        "data": str(tiny_dataset),
        "changes": [],
    }
    assert feature.pop("hash")
    assert feature == {
        "name": "count",
        "type": "int",
        "level": "request",
        "place": "mine.py:4",
        "description": "All.",
    }


def test_against_data(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> None:
    good = tackboard("features", "check", write(tmp_path, "last=events.last(events.item)"), "--data", tiny_dataset)
    assert good.code == 0
    assert good.out.splitlines()[-1].startswith(f"{tiny_dataset} has every column they read")
    bad = tackboard("features", "check", write(tmp_path, "price=item.price", "bad.py"), "--data", tiny_dataset)
    assert (bad.code, bad.out) == (3, "")
    assert bad.err.startswith("error: feature price (bad.py:4): item.price is not in the data\n")


def test_against_an_older_set(tackboard: Program, tmp_path: Path) -> None:
    old = write(tmp_path, "count=events.count()", "old.py")
    same = tackboard("features", "check", old, "--against", old)
    assert same.code == 0
    assert same.out.endswith(f"nothing changed since {old}\n")
    more = tackboard(
        "features", "check", write(tmp_path, "count=events.count(), price=item.price", "more.py"), "--against", old
    )
    assert more.code == 0
    assert f"since {old}: feature price (more.py:4) is added\n" in more.out
    assert more.out.endswith(f"since {old}: 1 feature moved to another line\n") and "moved from" not in more.out
    gone = tackboard("features", "check", write(tmp_path, "price=item.price", "gone.py"), "--against", old)
    assert (gone.code, gone.out) == (2, "")
    assert gone.err.splitlines()[0] == "error: feature count (old.py:4) is removed"
    changes = tackboard(
        "features", "check", write(tmp_path, "version=2, price=item.price", "new.py"), "--against", old, "--json"
    ).json()["changes"]
    assert [(change["feature"], change["needs_version"]) for change in changes] == [("count", True), ("price", False)]


@pytest.mark.parametrize("suffix", [":nothing", "/features.txt"])
def test_a_place_that_holds_none(tackboard: Program, tmp_path: Path, suffix: str) -> None:
    answer = tackboard("features", "check", f"{write(tmp_path, 'count=events.count()')}{suffix}")
    assert answer.code == 2
    assert answer.err.startswith("error: ")
