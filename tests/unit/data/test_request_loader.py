"""Requests by step number: every value checked against plain loops over the tables on disk."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tackboard.batch import HashConfig, RequestBatch, item_rows
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps, count_tokens
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Context, Events, Int, Item, Request
from tackboard.features.standard import standard_features

HASHING = HashConfig(num_hashes=2, num_rows=100)
WORLD = WorldConfig(num_users=40, num_items=60, num_topics=4, median_events=12.0, max_events=40)
HOUR = 3_600_000


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labelled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 120)
        write_world(WORLD, root, "small")
    label_dataset(
        open_dataset(root / "small"), LabelConfig(labels=(Label("click", HOUR), Label("save", 24 * HOUR))), quiet=True
    )
    return root / "small"


def config_of(path: Path, **settings: Any) -> RequestConfig:
    defaults: dict[str, Any] = {
        "max_history": 10,
        "validation_share": 0.0,
        "test_share": 0.0,
        "tokens_per_step": 400,
        "window_buckets": 2,
    }
    return RequestConfig(dataset=str(path), **(defaults | settings))


def make_steps(
    path: Path, *, rank: int = 0, world_size: int = 1, features: Any = None, **settings: Any
) -> RequestSteps:
    config = config_of(path, **settings)
    return RequestSteps(
        RequestSource(config, features=features), config, HASHING, seed=5, rank=rank, world_size=world_size
    )


def rows_of(batch: RequestBatch) -> dict[tuple[int, int], dict[str, Any]]:
    """Every request of a batch as plain values, by user and time."""
    histories, ids = batch.histories, batch.histories.item_ids
    found = {}
    for row in range(batch.num_requests):
        events = slice(int(histories.offsets[row]), int(histories.offsets[row + 1]))
        mine = batch.request_of == row
        found[int(histories.users[row]), int(batch.request_ms[row])] = {
            "items": ids[histories.items[events]].tolist(),
            "times": histories.times_ms[events].tolist(),
            "candidates": ids[batch.candidates[mine]].tolist(),
            "positions": batch.positions[mine].tolist(),
            "weights": batch.weights[mine].tolist(),
            "labels": {
                name: [int(v) if k else None for v, k in zip(label[mine], batch.known[name][mine], strict=True)]
                for name, label in batch.labels.items()
            },
            "request": {name: column[row].item() for name, column in histories.request.items()},
            "features": {name: column[mine].tolist() for name, column in batch.features.items()},
        }
    return found


def expected_rows(path: Path, max_history: int) -> dict[tuple[int, int], dict[str, Any]]:
    import pyarrow.parquet as pq

    dataset = open_dataset(path)
    events: dict[int, list[dict[str, Any]]] = {}
    for event in dataset.read_events().to_pylist():
        events.setdefault(event["user_id"], []).append(event)
    found = {}
    for request in pq.read_table(dataset.path / "requests.parquet").to_pylist():
        seen = [e for e in events.get(request["user_id"], []) if e["received_ms"] < request["time_ms"]][-max_history:]
        found[request["user_id"], request["time_ms"]] = {
            "items": [event["item_id"] for event in seen],
            "times": [event["time_ms"] for event in seen],
            "candidates": request["item_id"],
            "positions": request["position"],
            "weights": request["weight"],
            "labels": {"click": request["label_click"], "save": request["label_save"]},
            "request": {},
            "features": {},
        }
    return found


def test_an_epoch_holds_every_request_once_with_what_it_saw(labelled: Path) -> None:
    steps = make_steps(labelled)
    assert steps.plan.num_windows > 2
    for epoch in range(2):
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for step in range(epoch * steps.plan.steps_per_epoch, (epoch + 1) * steps.plan.steps_per_epoch):
            batch = steps[step]
            assert batch.histories.num_events + batch.num_candidates <= 400
            assert not found.keys() & rows_of(batch).keys()
            found |= rows_of(batch)
        assert found == expected_rows(labelled, 10)


def test_items_are_looked_up_once(labelled: Path) -> None:
    for step in range(4):
        batch = make_steps(labelled)[step]
        used = torch.cat([batch.histories.items, batch.candidates])
        assert torch.equal(torch.unique(used), torch.arange(len(batch.histories.item_ids)))
        assert torch.equal(batch.histories.item_rows, item_rows(batch.histories.item_ids.numpy(), HASHING))
        per_request = torch.arange(batch.num_requests) * 10
        assert torch.equal(batch.expand(per_request), batch.request_of * 10)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_world_size_sees_the_same_requests(labelled: Path, world_size: int) -> None:
    whole = make_steps(labelled)
    ranks = [make_steps(labelled, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(whole.plan.steps_per_epoch):
        together: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in ranks:
            together |= rows_of(rank[step])
        assert together == rows_of(whole[step])


def test_features_of_requests_and_candidates_are_computed(labelled: Path) -> None:
    def features(vocabulary: Vocabulary) -> FeatureSet:
        events, request, item = Events(), Request(), Item(topic=Int())
        own = FeatureSet(
            "own",
            num_before=events.count(),
            hour=request.time.hour("UTC"),
            topic=item.topic.fill_missing(-1),
            times_seen=events.matching(events.item, item.id).count(),
        )
        return own.merged(standard_features(vocabulary, 10))

    steps = make_steps(labelled, features=features)
    dataset = open_dataset(labelled)
    topics = dict(zip(*(dataset.read_items()[name].to_pylist() for name in ("item_id", "topic")), strict=True))
    everything = expected_rows(labelled, 10**6)
    for step in range(steps.plan.steps_per_epoch):
        for key, row in rows_of(steps[step]).items():
            assert row["request"]["num_before"] == len(everything[key]["items"])
            assert row["request"]["hour"] == key[1] // HOUR % 24
            seen = everything[key]["items"]
            assert row["features"]["times_seen"] == [seen.count(item) for item in row["candidates"]]
            assert row["features"]["topic"] == [topics[item] for item in row["candidates"]]


def test_the_context_of_a_request_is_that_of_its_first_event_that_has_one(labelled: Path, tmp_path: Path) -> None:
    """Two users may have requests of one id."""

    def features(vocabulary: Vocabulary) -> FeatureSet:
        depth = Context(depth=Int()).depth.fill_missing(-1)
        return FeatureSet("own", depth=depth).merged(standard_features(vocabulary, 10))

    rows = [  # user, request, time, context
        (1, "a", 0, None), (1, "a", 10, '{"depth": 1}'), (1, "a", 20, '{"depth": 2}'), (1, "b", 30, None),
        (2, "a", 5, '{"depth": 3}'), (2, "b", 15, '{"more": 3}'), (2, None, 15, '{"depth": 4}'),
    ]  # fmt: skip
    names = pa.array(["view"] * (len(rows) - 1) + ["click"]).dictionary_encode()
    users, requests, times, contexts = zip(*rows, strict=True)
    events = pa.table(
        {
            "user": pa.array(users),
            "item": pa.array(range(len(rows))),
            "action": names,
            "surface": names,
            "time_ms": pa.array(times),
            "received_ms": pa.array(times),
            "order": pa.array(range(len(rows))),
            "request": pa.array(requests),
            "context": pa.array(contexts),
        }
    )
    write_dataset(tmp_path, "told", events)
    config = LabelConfig(labels=(Label("click", HOUR),), shown="view")
    label_dataset(open_dataset(tmp_path / "told"), config, quiet=True)
    batch = make_steps(tmp_path / "told", features=features)[0]
    found = {key: row["request"]["depth"] for key, row in rows_of(batch).items()}
    assert found == {(1, 0): 1, (1, 30): -1, (2, 5): 3, (2, 15): -1}
    with pytest.raises(DataError, match=r"context\.depth.* is not in the data(.|\n)*--context"):
        make_steps(labelled, features=features)[0]


def test_only_some_labels_are_read(labelled: Path) -> None:
    batch = make_steps(labelled, labels=("save",))[0]
    assert list(batch.labels) == list(batch.known) == ["save"]
    with pytest.raises(ConfigError, match="did you mean save"):
        make_steps(labelled, labels=("sav",))


def test_a_dataset_without_labels_says_how_to_get_them(tiny_dataset: Path) -> None:
    with pytest.raises(DataError, match="tackboard data label"):
        RequestSource(config_of(tiny_dataset))


@pytest.mark.parametrize("wrong", [{"max_history": 0}, {"max_history": 16_001}, {"tokens_per_step": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(RequestConfig(dataset="x"), **wrong)


def test_tokens_are_those_of_histories_and_candidates(labelled: Path) -> None:
    source = RequestSource(config_of(labelled))
    steps = RequestSteps(source, config_of(labelled), HASHING, 0)
    tokens, longest = count_tokens(source, steps.chosen, {"users": "all"})
    sizes = {key: len(row["items"]) + len(row["candidates"]) for key, row in expected_rows(labelled, 10).items()}
    assert tokens.sum() == sum(sizes.values())
    assert longest == max(sizes.values())
    buckets = source.dataset.layout.buckets_of(np.array([user for user, _ in sizes]))
    assert tokens.tolist() == np.bincount(buckets, list(sizes.values()), source.dataset.layout.num_buckets).tolist()


def test_requests_are_counted_once(labelled: Path) -> None:
    make_steps(labelled, max_history=7)
    source = RequestSource(config_of(labelled, max_history=7))
    again = RequestSteps(source, config_of(labelled, max_history=7), HASHING, 0)
    assert (source.counters.num_rows, source.request_counters.num_rows) == (0, 0)
    fresh = [make_steps(labelled, max_history=7, validation_share=share) for share in (0.0, 0.3)]
    assert fresh[0].plan.total_tokens == again.plan.total_tokens > fresh[1].plan.total_tokens


def test_the_newest_of_very_long_histories_are_read(tmp_path: Path) -> None:
    """One user with 20,000 events, of whom a request may read 16,000; some were received late."""
    count = 20_000
    times = np.arange(count) * 1000
    received = times + np.where(np.arange(count) % 97 == 0, 5_000_000, 0)
    names = pa.array(["click"]).dictionary_encode()
    events = pa.table(
        {
            "user": np.full(count, 7),
            "item": np.arange(count) % 5000,
            "action": names.take(pa.array(np.zeros(count, dtype=np.int64))),
            "surface": names.take(pa.array(np.zeros(count, dtype=np.int64))),
            "time_ms": times,
            "received_ms": received,
            "order": np.arange(count),
            "request": np.arange(count),
        }
    )
    shown = np.array([100, 12_000, 19_999])
    impressions = pa.table({"request": shown, "position": np.zeros(3, dtype=np.int32), "item_id": shown % 5000})
    write_dataset(tmp_path, "long", events, impressions=impressions)
    label_dataset(open_dataset(tmp_path / "long"), LabelConfig(labels=(Label("click", HOUR),)), quiet=True)
    steps = make_steps(tmp_path / "long", max_history=16_000, tokens_per_step=40_000)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for step in range(steps.plan.first_step(1)):
        found |= rows_of(steps[step])
    assert len(found) == 3
    for (_, time_ms), row in found.items():
        expected = times[received < time_ms][-16_000:]
        assert row["times"] == expected.tolist()
        assert row["items"] == (expected // 1000 % 5000).tolist()
    assert max(len(row["times"]) for row in found.values()) == 16_000


def requests_of(steps: RequestSteps) -> list[tuple[int, int]]:
    found = [key for step in range(steps.plan.first_step(1)) for key in rows_of(steps[step])]
    assert len(set(found)) == len(found)
    return sorted(found)


def test_parts_hold_every_request_once(labelled: Path) -> None:
    config = config_of(labelled, validation_share=0.3, test_share=0.3)
    source = config.open(None)
    parts = [requests_of(config.steps(source, HASHING, 5, part=part)) for part in ("train", "validation", "test")]
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == requests_of(make_steps(labelled))
    users = [{user for user, _ in part} for part in parts]
    assert not users[0] & users[1] and not users[0] & users[2] and not users[1] & users[2]


def test_another_dataset_may_judge(labelled: Path) -> None:
    config = config_of(labelled, validation_share=0.3, test_share=0.7, judged_on=str(labelled))
    source = config.open(None)
    assert requests_of(config.steps(source, HASHING, 5)) == requests_of(make_steps(labelled)), "all of them train"
    judges = [requests_of(config.steps(source, HASHING, 5, part=part)) for part in ("validation", "test")]
    assert all(judges)
    assert sorted(itertools.chain(*judges)) == requests_of(make_steps(labelled))


@pytest.mark.parametrize("count", [1, 50, 10_000_000])
def test_some_requests_are_drawn_by_the_seed(labelled: Path, count: int) -> None:
    config = config_of(labelled, max_requests=count)
    source = config.open(None)
    every = requests_of(make_steps(labelled))
    drawn = requests_of(config.steps(source, HASHING, 5))
    assert len(drawn) == min(count, len(every))
    assert set(drawn) <= set(every)
    fewer = requests_of(config_of(labelled, max_requests=max(1, count // 2)).steps(source, HASHING, 5))
    assert set(fewer) <= set(drawn), "a smaller draw is part of a larger one"
    if 1 < count < len(every):
        assert requests_of(config.steps(source, HASHING, 6)) != drawn
