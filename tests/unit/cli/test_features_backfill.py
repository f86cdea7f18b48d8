"""`tackboard features backfill`: a new snapshot, told in two lines or one JSON object."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.vocabulary import Vocabulary
from tackboard.events.dataset import open_dataset
from tackboard.features.feature_set import load_features
from tackboard.features.standard import features_for_model
from tackboard.features.stored import read_features_table

Program = Callable[..., Any]
SOURCE = """\
from tackboard.features.language import Events, FeatureSet
events = Events()
features = FeatureSet("home", count=events.count(){more})
"""


@pytest.fixture
def dataset(tiny_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dataset, tmp_path / "tiny", symlinks=True))


def test_a_backfill_and_one_more_feature(tackboard: Program, tmp_path: Path, dataset: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(SOURCE.format(more=""))
    second.write_text(SOURCE.format(more=", items=events.distinct(events.item)"))
    answer = tackboard("features", "backfill", first, "--data", dataset, "--json")
    assert answer.code == 0
    result = answer.json()
    assert Path(result["dataset"]) == (dataset / "latest").resolve()
    assert (result["set"], result["version"], result["num_rows"]) == ("home", 1, 137)
    assert (result["computed"], result["taken_over"], result["changes"]) == (["count"], [], [])
    assert "computing features: 137/137 events" in answer.err
    counts = read_features_table(open_dataset(dataset), ["count"])["count"].to_pylist()
    assert counts[:3] == [0, 1, 2]

    answer = tackboard("features", "backfill", second, "--data", dataset)
    assert answer.code == 0
    assert "feature items (second.py:3) is added\n" in answer.out
    assert "137 events; 1 features computed, 1 taken over\n" in answer.out
    assert answer.out.endswith(f"dataset  {(dataset / 'latest').resolve()}\n")
    assert list(read_features_table(open_dataset(dataset))) == ["count", "items"]


def test_the_example_works_on_a_world(tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = ["num_users=40", "num_items=60", "num_topics=5", "median_events=12", "max_events=30"]
    assert tackboard("data", "synth", *(word for each in world for word in ("--set", each))).code == 0
    example = Path(__file__).parents[3] / "examples" / "features.py"
    assert tackboard("features", "check", example, "--data", "datasets/demo").code == 0
    assert tackboard("features", "explain", example, "--feature", "like_rate").code == 0
    reads = ["history.item", "history.action", "history.surface", "like_rate", "interest", "recency"]
    features_for_model(reads, Vocabulary.from_names(["click"], ["home"]), 64, load_features(str(example)))
    answer = tackboard("features", "backfill", example, "--data", "datasets/demo", "--json")
    assert answer.code == 0
    stored = read_features_table(open_dataset("datasets/demo"))
    assert list(stored) == answer.json()["computed"]
    assert max(stored["likes_7d"].to_pylist()) > 0
    assert tackboard("verify", "datasets/demo").code == 0
