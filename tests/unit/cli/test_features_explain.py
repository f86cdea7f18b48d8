"""`tackboard features explain`: the plan, of all features or of some, for people and for machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Program = Callable[..., Any]
SOURCE = """\
from tackboard.features.language import Events, FeatureSet, Item, String
item, events = Item(name=String()), Events()
features = FeatureSet("home", count=events.count(), name=item.name.fill_missing("").lower())
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_the_plan_as_text(tackboard: Program, spec: Path) -> None:
    answer = tackboard("features", "explain", spec)
    assert answer.code == 0
    assert answer.out.startswith("feature set home, version 1, ")
    assert "count(%0)" in answer.out and "→ name" in answer.out
    assert answer.out.splitlines()[-1].startswith("2 features, ")


def test_some_features_only(tackboard: Program, spec: Path) -> None:
    answer = tackboard("features", "explain", spec, "--feature", "count")
    assert "lower" not in answer.out and "→ count" in answer.out
    wrong = tackboard("features", "explain", spec, "--feature", "cuont")
    assert wrong.code == 2
    assert "did you mean count?" in wrong.err


def test_json(tackboard: Program, spec: Path) -> None:
    plan = tackboard("features", "explain", spec, "--feature", "name", "--json").json()
    assert list(plan["features"]) == ["name"]
    operations = [(node["op"], node["type"], node["level"]) for node in plan["nodes"]]
    assert operations == [
        ("source", "string?", "candidate"),
        ("fill_missing", "string", "candidate"),
        ("lower", "string", "candidate"),
    ]
    assert {node["line"] for node in plan["nodes"]} == {3}
