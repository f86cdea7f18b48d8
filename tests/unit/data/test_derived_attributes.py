"""Attributes computed from the log: what is added, what stays, what they may know, and who can read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.batch import HashConfig
from tackboard.core import files
from tackboard.core.errors import UsageError
from tackboard.core.keyed_random import uniform
from tackboard.data.derived_attributes import ATTRIBUTES, Attributes, VectorsConfig, add_attributes, read_attributes
from tackboard.data.pseudo_requests import PseudoRequestConfig, make_pseudo_requests
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.retention import retain
from tackboard.features.backfill import backfill
from tackboard.features.column import Column, differing_rows
from tackboard.features.entity_tables import EntityTable
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Item, Request, Time, Vector
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import standard_features
from tackboard.features.types import TIME, FeatureType

DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
NUM_USERS, NUM_ITEMS = 30, 24
VECTORS = VectorsConfig(name="content", width=6, window=2)


def log(num_days: int = 20) -> list[tuple[Any, ...]]:
    """A user reads one item of his half of the catalogue a day; item n is not read before day n / 2."""
    rows = []
    for user in range(NUM_USERS):
        for day in range(num_days):
            draw = float(uniform(4, user, day)[0])
            item = 2 * int(draw * (day + 1) * 0.55) + user % 2
            rows.append((user, item, "read" if day % 3 else "skip", "home", START_MS + day * DAY_MS + 60_000 * user))
    return rows


def authors(**columns: Any) -> pa.Table:
    """An attribute file: items 0 to 29, of which the last are never read; item 29 has no author."""
    names = [f"a{item % 2}" if item < 29 else None for item in range(30)]
    return pa.table({"item": list(range(30)), "author": names} | columns)


@pytest.fixture
def folder(make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 100)
    return make_dataset(tmp_path, log(), item_attributes=authors())


def add(folder: Path, first_event: str | None = None, vectors: VectorsConfig | None = None) -> Attributes:
    return add_attributes(open_dataset(folder), first_event=first_event, vectors=vectors, quiet=True)


def vectors_in(folder: Path, name: str = "content") -> np.ndarray:
    return np.array(open_dataset(folder).read_items()[name].to_pylist(), dtype=np.float32)


def test_items_gain_columns_and_everything_else_stays(folder: Path) -> None:
    old = open_dataset(folder)
    result = add(folder, "first_event_ms", VECTORS)
    new = open_dataset(folder)
    assert new.path == result.path != old.path
    items = new.read_items()
    assert items.drop_columns(["first_event_ms", "content"]).equals(old.read_items())
    firsts: dict[int, int] = {}
    for _, item, _, _, time_ms in log():
        firsts[item] = min(firsts.get(item, time_ms), time_ms)
    assert items["first_event_ms"].to_pylist() == [firsts.get(item) for item in items["item"].to_pylist()]
    assert items.schema.field("content").type == pa.list_(pa.float32(), 6)
    for name in ("events.parquet", "users.parquet", "statistics.json", "layout.json"):
        assert (new.path / name).stat().st_ino == (old.path / name).stat().st_ino
    counts = result.made["content"]["counts"]
    assert counts["events"] == new.num_events and counts["pairs_dropped"] == 0
    assert counts["with_neighbours"] + counts["from_group"] + counts["zero"] == 30 and counts["zero"] > 5
    assert counts["with_neighbours"] == int(vectors_in(folder).any(axis=1).sum())
    assert result.made == read_attributes(new.path)


def test_again_makes_nothing_and_other_settings_replace(folder: Path) -> None:
    first = add(folder, "first_event_ms", VECTORS)
    assert add(folder, "first_event_ms", VECTORS).path == first.path == add(folder, None, VECTORS).path
    wide = add(folder, None, dataclasses.replace(VECTORS, width=3))
    assert wide.path != first.path and vectors_in(folder).shape == (30, 3)
    assert set(wide.made) == {"first_event_ms", "content"}, "the other attribute stays"
    second = add(folder, None, dataclasses.replace(VECTORS, name="other"))
    assert set(second.made) == {"first_event_ms", "content", "other"}


def test_a_replaced_attribute_takes_the_stored_features_with_it(folder: Path) -> None:
    add(folder, None, VECTORS)
    item = Item(content=Vector(6))
    stored = backfill(open_dataset(folder), FeatureSet("own", size=item.content.dot(item.content)), quiet=True).path
    added = add(folder, "first_event_ms").path
    assert (stored / "features.json").exists() and (added / "features.json").exists()
    replaced = add(folder, None, dataclasses.replace(VECTORS, window=1)).path
    assert not (replaced / "features.json").exists() and not (replaced / "features.parquet").exists()


def test_vectors_see_nothing_from_until_on(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    until = START_MS + 10 * DAY_MS
    before = [row for row in log() if row[4] < until]
    after = [row for row in log() if row[4] >= until]
    late = (7, 3, "read", "home", until - 5)
    config = dataclasses.replace(VECTORS, until_ms=until)
    found = []
    for name, rest in (("one", after), ("two", [(u, 23 - i, a, s, t) for u, i, a, s, t in after])):
        received = [row[4] for row in [*before, *rest]] + [until]
        folder = make_dataset(tmp_path, [*before, *rest, late], name, received_ms=received, item_attributes=authors())
        found.append((vectors_in(add(folder, None, config).path), add(folder, None, config).made["content"]["counts"]))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert found[0][1]["events"] == len(before), "an event that was received later does not count either"
    assert not np.array_equal(found[0][0], vectors_in(add(tmp_path / "one", None, VECTORS).path))


def test_only_the_named_actions_count(folder: Path) -> None:
    counts = add(folder, None, dataclasses.replace(VECTORS, actions=("read",))).made["content"]["counts"]
    assert counts["events"] == sum(row[2] == "read" for row in log())


def test_a_group_fills_the_items_without_neighbours(folder: Path) -> None:
    plain = vectors_in(add(folder, None, VECTORS).path)
    result = add(folder, None, dataclasses.replace(VECTORS, group="author"))
    filled = vectors_in(folder)
    own = plain.any(axis=1)
    assert np.array_equal(filled[own], plain[own]) and 0 < own.sum() < 28
    for item in np.flatnonzero(~own)[:-1]:
        mean = plain[own & (np.arange(30) % 2 == item % 2)].mean(axis=0)
        assert np.allclose(filled[item], mean, atol=1e-6)
    assert not filled[29].any(), "an item without an author gets zeros"
    counts = result.made["content"]["counts"]
    assert (counts["from_group"], counts["zero"]) == (int((~own).sum()) - 1, 1)


def test_attributes_that_change_with_time_gain_the_same_values(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    versions = pa.concat_tables([authors(valid_from_ms=[0] * 30), authors(valid_from_ms=[START_MS] * 30)])
    folder = make_dataset(tmp_path, log(), item_attributes=versions)
    add(folder, "first_event_ms", VECTORS)
    dataset = open_dataset(folder)
    history, items = dataset.read_history("item"), dataset.read_items()
    assert history is not None and history.num_rows == 2 * items.num_rows
    for name in ("first_event_ms", "content"):
        assert history[name].to_pylist() == [value for value in items[name].to_pylist() for _ in range(2)]


def test_training_and_serving_read_them(folder: Path) -> None:
    add(folder, "first_event_ms", VECTORS)
    make_pseudo_requests(open_dataset(folder), PseudoRequestConfig(candidates=5, pool="all", per_user=2), quiet=True)
    item, request = Item(first_event_ms=Time(), content=Vector(6)), Request()
    age = (request.time.seconds_since(item.first_event_ms) / 86_400.0).fill_missing(-1.0)
    own = FeatureSet("own", age_days=age, content=item.content.fill_missing(0.0))
    config = RequestConfig(dataset=str(folder), max_history=8)
    source = RequestSource(config, features=lambda names: own.merged(standard_features(names, 8)))
    batch = RequestSteps(source, config, HashConfig(num_hashes=1, num_rows=64), seed=0)[0]
    dataset = open_dataset(folder)
    table = dataset.read_items()
    rows = batch.histories.item_ids[batch.candidates].numpy()
    moments = batch.expand(batch.request_ms).numpy()
    firsts = np.array(table["first_event_ms"].to_pylist(), dtype=float)[rows]
    assert np.allclose(batch.features["age_days"].numpy(), (moments - firsts) / DAY_MS, atol=1e-4)
    assert np.array_equal(batch.features["content"].numpy(), vectors_in(folder)[rows])
    # Serving: from a table in memory, and with the attributes in the request.
    ids, moment = np.array([3, 28, 99]), START_MS + 30 * DAY_MS
    items = EntityTable.from_arrow(table, "item", own.plan)
    stored = OnlineExecutor(own.plan, items=items).compute(request_ms=moment, item_ids=ids)
    given = {
        "first_event_ms": Column.of(TIME, [table["first_event_ms"][3].as_py(), None, None]),
        "content": Column.of(FeatureType("vector", width=6), [table["content"][3].as_py(), [0.0] * 6, None]),
    }
    sent = OnlineExecutor(own.plan).compute(request_ms=moment, item_ids=ids, item=given)
    assert stored["age_days"].to_pylist()[1:] == [-1.0, -1.0]
    assert all(len(differing_rows(stored[name], sent[name])) == 0 for name in ("age_days", "content"))


def test_what_was_complete_is_taken_up_after_a_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = open_dataset(folder).path

    def stop_at(wanted: str) -> Callable[[str], None]:
        def stop(point: str) -> None:
            if point == wanted:
                raise OSError(5, "Input/output error")

        return stop

    for point, left in (
        ("items.parquet:after-write", 1),
        ("attributes.json:after-write", 1),
        ("latest:before-rename", 2),
    ):
        monkeypatch.setattr(files, "observer", stop_at(point))
        with pytest.raises(OSError, match="Input/output"):
            add(folder, "first_event_ms", VECTORS)
        assert open_dataset(folder).path == old and len(list(folder.glob("[0-9]*"))) == left
    monkeypatch.setattr(files, "observer", None)
    complete = next(path for path in folder.glob("[0-9]*") if path != old)
    assert add(folder, "first_event_ms", VECTORS).path == complete


def test_retention_keeps_them(folder: Path) -> None:
    add(folder, "first_event_ms", VECTORS)
    before = open_dataset(folder).read_items(["first_event_ms", "content"])
    kept = open_dataset(retain(open_dataset(folder), 5.0).path)
    assert kept.read_items(["first_event_ms", "content"]).equals(before) and (kept.path / ATTRIBUTES).exists()
    assert kept.num_events < len(log())
    again = add(folder, "first_event_ms", VECTORS)
    assert again.path != kept.path and again.made["content"]["counts"]["events"] == kept.num_events
    firsts = open_dataset(folder).read_items(["first_ms", "first_event_ms"])
    assert firsts["first_event_ms"].equals(firsts["first_ms"]), "computed again from the events that are left"


@pytest.mark.parametrize(
    ("first_event", "vectors", "message"),
    [
        (None, None, "no attribute was named"),
        ("content", VECTORS, "two attributes are named content"),
        ("first ms", None, "'first ms' cannot name an attribute"),
        ("first_ms", None, "items have an attribute first_ms that this command did not make"),
        ("author", None, "items have an attribute author that this command did not make"),
        (None, dataclasses.replace(VECTORS, group="autor"), "items have no attribute 'autor'"),
        (None, dataclasses.replace(VECTORS, actions=("buy",)), "no event of tiny has the action 'buy'"),
    ],
)
def test_what_is_refused(folder: Path, first_event: str | None, vectors: VectorsConfig | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        add(folder, first_event, vectors)
    assert len(list(folder.glob("[0-9]*"))) == 1


@pytest.mark.parametrize("change", [{"width": 0}, {"width": 5000}, {"window": 0}, {"max_pairs": 0}])
def test_settings_out_of_range_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="allowed: 1"):
        dataclasses.replace(VECTORS, **change)
