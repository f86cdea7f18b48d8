"""The datasets of the bench: what pretraining may read, what requests hold, and the world, which is frozen."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.bench.finetune import data
from tackboard.bench.finetune.data import SOURCES, WORLD, find_source, make_datasets, names_of
from tackboard.core.config import to_dict
from tackboard.core.errors import UsageError
from tackboard.data.co_engagement import PairCounts, ppmi, vectors_of
from tackboard.data.derived_attributes import VectorsConfig, read_attributes
from tackboard.data.request_layout import read_requests
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.schema import numpy_column
from tackboard.events.synthetic.world_items import CONTENT_WIDTH


def test_the_world_and_the_rules_are_frozen() -> None:
    rules = {name: dataclasses.asdict(source.config) for name, source in SOURCES.items()}
    # This setting came after the results were published, and it is off.
    world = {name: value for name, value in to_dict(WORLD).items() if (name, value) != ("item_half_life_hours", 0.0)}
    text = json.dumps([world, data.SPLIT_DAY, rules], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "befd19a87a8848d7", (
        "the world or the rules of requests changed: published results no longer belong to them. Measure again."
    )


def made(name: str, folder: Path, files: Path | None = None) -> tuple[Dataset, Dataset]:
    make_datasets(SOURCES[name], folder, files, quick=True)
    requests, before = (open_dataset(folder / part) for part in names_of(SOURCES[name], quick=True))
    return requests, before


def check(requests: Dataset, before: Dataset, labels: list[str]) -> None:
    """Each request has one true item, and pretraining reads no event from the user's first request on."""
    table = read_requests(requests)
    assert table.num_rows > 10
    truth = table[f"label_{labels[0]}"].to_pylist()
    assert all(sum(row) == 1 for row in truth)
    assert [name for name in table.column_names if name.startswith("label_")] == [f"label_{name}" for name in labels]
    first: dict[int, int] = {}
    for user, time in zip(table["user_id"].to_pylist(), table["time_ms"].to_pylist(), strict=True):
        first.setdefault(user, time)
    events = before.read_events(["user_id", "time_ms"])
    latest: dict[int, int] = dict(zip(events["user_id"].to_pylist(), events["time_ms"].to_pylist(), strict=True))
    assert any(user in first for user in latest)
    assert all(time < first[user] for user, time in latest.items() if user in first)
    assert requests.num_items == before.num_items, "pretraining knows the whole catalogue"


def test_the_synthetic_world(tiny_sizes: None, tmp_path: Path) -> None:
    requests, before = made("synthetic", tmp_path)
    check(requests, before, ["next", "save"])
    since = SOURCES["synthetic"].config.since_ms
    assert since is not None and max(before.read_events(["time_ms"])["time_ms"].to_pylist()) < since
    assert min(read_requests(requests)["time_ms"].to_pylist()) >= since
    assert {"birth_ms", "content"} <= set(requests.read_items().column_names)
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    make_datasets(SOURCES["synthetic"], tmp_path, None, quick=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == again, "nothing is made twice"


def test_movielens_splits_each_user(fake_ml_1m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "ml-1m", dataclasses.replace(SOURCES["ml-1m"], quick_stride=1))
    requests, before = made("ml-1m", tmp_path / "datasets", fake_ml_1m)
    check(requests, before, ["next"])
    lengths = before.read_users(["num_events"])["num_events"].to_pylist()
    assert set(lengths) == {2}, "of 12 ratings of each user, the newest 10 are requests"
    ids = numpy_column(requests.read_items(["item_id"]), "item_id")
    pairs = PairCounts(len(ids), window=VectorsConfig(name="content").window, max_pairs=1000, seed=0)
    events = before.read_events(["user_id", "item_id"])
    pairs.add(numpy_column(events, "user_id"), np.searchsorted(ids, numpy_column(events, "item_id")))
    expected, _ = vectors_of(ppmi(pairs), ids, CONTENT_WIDTH, seed=0)
    stored = np.array(requests.read_items(["content"])["content"].to_pylist())
    assert np.abs(expected).sum() > 0
    np.testing.assert_allclose(stored, expected, atol=1e-5, err_msg="vectors read no event that is an answer")


def test_kakao_brunch_has_ages_and_vectors(fake_brunch: Path, tmp_path: Path) -> None:
    requests, before = made("kakao-brunch", tmp_path / "datasets", fake_brunch)
    check(requests, before, ["next"])
    items = requests.read_items(["birth_ms", "first_ms", "content"])
    assert items["birth_ms"].equals(items["first_ms"]), "the first read stands in for the birth"
    stored = read_attributes(requests.path)
    assert stored["content"]["until_ms"] == SOURCES["kakao-brunch"].config.since_ms, "vectors read no later event"
    assert np.abs(np.array(items["content"].to_pylist())).sum() > 0


def test_an_unknown_dataset() -> None:
    with pytest.raises(UsageError, match=r"--dataset syntetic does not exist\nallowed: synthetic, ml-1m, kakao-brunch"):
        find_source("syntetic")


def test_files_are_needed_only_once(fake_brunch: Path, tmp_path: Path, tiny_study: Callable[..., object]) -> None:
    tiny_study("kakao-brunch", fake_brunch)
    tiny_study("kakao-brunch", None)
