"""`tackboard features …`: tables and plans, new snapshots, pages, and a replay of what was served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core.vocabulary import Vocabulary
from tackboard.events.dataset import open_dataset
from tackboard.features.column import Column
from tackboard.features.feature_set import load_features
from tackboard.features.language import Events, FeatureSet
from tackboard.features.reference import BEGIN, END, reference
from tackboard.features.serving_log import FeatureLog
from tackboard.features.standard import features_for_model
from tackboard.features.stored_features import read_features_table
from tackboard.features.types import INT

Program = Callable[..., Any]
HEAD = """\
from tackboard.features.language import *
item, events, request = Item(price=Float(), name=String()), Events(), Request()

"""
KEY = bytes(range(32))
USER = 103
NUM_EVENTS = 8
"""Events of the tiny dataset's user 103."""


def write(folder: Path, features: str, name: str = "mine.py") -> Path:
    """A file of features, which stand in its line 4."""
    path = folder / name
    path.write_text(f'{HEAD}features = FeatureSet("home", {features})\n')
    return path


def test_check_shows_a_table(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> None:
    answer = tackboard("features", "check", write(tmp_path, "count=events.count(), price=item.price"))
    assert answer.code == 0
    assert [line.split() for line in answer.out.splitlines()[:-1]] == [
        ["name", "type", "level", "place"],
        ["count", "int", "request", "mine.py:4"],
        ["price", "float?", "candidate", "mine.py:4"],
    ]
    assert answer.out.splitlines()[-1].startswith("feature set home, version 1, ")
    assert answer.out.endswith(": 2 features\n")
    fits = tackboard("features", "check", write(tmp_path, "last=events.last(events.item)"), "--data", tiny_dataset)
    assert fits.code == 0
    assert fits.out.splitlines()[-1].startswith(f"{tiny_dataset} has every column that is read")


def test_check_prints_json(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> None:
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


def test_check_against_an_older_set(tackboard: Program, tmp_path: Path) -> None:
    old = write(tmp_path, "count=events.count()", "old.py")
    same = tackboard("features", "check", old, "--against", old)
    assert same.code == 0
    assert same.out.endswith(f"nothing changed since {old}\n")
    more = write(tmp_path, "count=events.count(), price=item.price", "more.py")
    answer = tackboard("features", "check", more, "--against", old)
    assert answer.code == 0
    assert f"since {old}: feature price (more.py:4) is added\n" in answer.out
    assert answer.out.endswith(f"since {old}: 1 feature moved to another line\n") and "moved from" not in answer.out
    new = write(tmp_path, "version=2, price=item.price", "new.py")
    changes = tackboard("features", "check", new, "--against", old, "--json").json()["changes"]
    assert [(change["feature"], change["needs_version"]) for change in changes] == [("count", True), ("price", False)]


def test_explain_shows_the_plan_of_all_features_or_of_some(tackboard: Program, tmp_path: Path) -> None:
    spec = write(tmp_path, 'count=events.count(), name=item.name.fill_missing("").lower()')
    answer = tackboard("features", "explain", spec)
    assert answer.code == 0
    assert answer.out.startswith("feature set home, version 1, ")
    assert "count(%0)" in answer.out and "→ name" in answer.out
    assert answer.out.splitlines()[-1].startswith("2 features, ")
    some = tackboard("features", "explain", spec, "--feature", "count")
    assert "lower" not in some.out and "→ count" in some.out
    plan = tackboard("features", "explain", spec, "--feature", "name", "--json").json()
    assert list(plan["features"]) == ["name"]
    operations = [(node["op"], node["type"], node["level"], node["line"]) for node in plan["nodes"]]
    assert operations == [
        ("source", "string?", "candidate", 4),
        ("fill_missing", "string", "candidate", 4),
        ("lower", "string", "candidate", 4),
    ]


def test_a_backfill_and_one_more_feature(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> None:
    dataset = Path(shutil.copytree(tiny_dataset, tmp_path / "tiny", symlinks=True))
    first = write(tmp_path, "count=events.count()", "first.py")
    second = write(tmp_path, "count=events.count(), items=events.distinct(events.item)", "second.py")
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
    assert "feature items (second.py:4) is added\n" in answer.out
    assert "137 events; 1 features computed, 1 copied from the last snapshot\n" in answer.out
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


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, 'hour=request.time.hour().described("<script>"), all=events.count()')


def test_docs_write_a_page_with_models(tackboard: Program, described: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "signature.json").write_text(json.dumps({"name": "pin", "version": "3", "reads": ["hour"]}))
    answer = tackboard("features", "docs", described, "--models", bundle, "--models", bundle)
    assert answer.code == 0
    assert answer.out == "features.html: 2 features, 2 sources, 2 models\n"
    html = (tmp_path / "features.html").read_text()
    assert "pin 3" in html and "mine.py:4" in html and "<script" not in html
    assert tackboard("features", "docs", described, "--out", tmp_path / "other.html").code == 0
    assert "no model was named" in (tmp_path / "other.html").read_text()


def test_docs_print_the_reference_or_put_it_into_a_page(tackboard: Program, tmp_path: Path) -> None:
    assert tackboard("features", "docs", "--reference").out == reference()
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert "renewed" in tackboard("features", "docs", "--reference", "--out", page).out
    assert reference() in page.read_text()
    assert "up to date" in tackboard("features", "docs", "--reference", "--out", page).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no features were named"),
        (["mine.py", "--out", "absent/page.html"], "absent is not a folder"),
        (["mine.py", "--reference"], "takes no features"),
        (["--reference", "--out", "absent.md"], "absent.md is not a file"),
    ],
)
def test_wrong_use_of_docs_writes_nothing(
    tackboard: Program, described: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    answer = tackboard("features", "docs", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.fixture
def replay(tackboard: Program, tmp_path: Path, tiny_dataset: Path) -> Callable[..., Any]:
    """`replay([0, 8], "--json")` replays a log of requests of which each counted so many events."""

    def run(counts: list[int], *options: str) -> Any:
        log = tmp_path / f"log-{'-'.join(map(str, counts))}"
        if not log.exists():
            write_log(log, counts)
        (tmp_path / "log.key").write_text(KEY.hex())
        return tackboard("features", "replay", log, "--data", tiny_dataset, "--key", tmp_path / "log.key", *options)

    return run


def write_log(folder: Path, counts: list[int]) -> None:
    """A request that counts 0 came before all events, where 0 is right."""
    events = Events()
    features = FeatureSet("home", num_events=events.count(), num_items=events.distinct(events.item))
    log = FeatureLog(folder, features, KEY)
    for number, count in enumerate(counts):
        values = {"num_events": Column.of(INT, [count]), "num_items": Column.of(INT, [-1 if count else 0])}
        log.offer(user_id=USER, request_ms=0 if count == 0 else 10**12 + number, item_ids=np.arange(2), features=values)
    assert log.close()


def test_a_replay_without_difference(replay: Callable[..., Any]) -> None:
    answer = replay([0, 0, 0], "--json")
    assert answer.code == 0
    assert (answer.json()["num_mismatches"], answer.json()["num_values"]) == (0, 6)
    answer = replay([0, 0, 0], "--limit", "2")
    assert answer.code == 0
    assert "2 requests compared, 4 values, 0 differ" in answer.out


def test_a_replay_names_the_feature_that_differs_and_counts_the_others(replay: Callable[..., Any]) -> None:
    answer = replay([0, NUM_EVENTS, NUM_EVENTS], "--json")
    assert answer.code == 3
    assert answer.err.startswith("error: the served values of feature num_items differ from training: 2 of 3")
    assert answer.json()["features"]["num_events"]["mismatches"]["skew"] == 0
    assert answer.json()["features"]["num_items"]["examples"][0]["served"] == "-1"
    text = replay([0, NUM_EVENTS, NUM_EVENTS], "--examples", "1")
    assert text.code == 3
    assert text.out.count("served -1, recomputed") == 1
    both = replay([99])
    assert both.code == 3
    assert "number of other features that differ: 1" in both.err
