"""The rankers' features: the age of a candidate and its content vector, in training and for one request."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tackboard.batch import HashConfig
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.events.dataset import open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.events.synthetic.world_items import CONTENT_WIDTH
from tackboard.features.column import Column
from tackboard.features.feature_set import load_features
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import standard_features
from tackboard.features.types import STRING, TIME, FeatureType
from tackboard.recipes import demo_features
from tackboard.recipes.ranking_features import features

DAY_MS = 86_400_000
WORLD = WorldConfig(num_users=20, num_items=80, num_topics=5, median_events=10.0, max_events=20)


def test_the_request_features_are_those_of_the_demo() -> None:
    ours, demo = features.feature_hashes(), demo_features.features.feature_hashes()
    assert {name: ours[name] for name in demo} == demo
    assert all(not one.type.nullable and one.description for one in features.features())


def test_age_and_content_by_hand() -> None:
    vector = [0.5] * CONTENT_WIDTH
    values = OnlineExecutor(features.plan).compute(
        history={"time": Column.of(TIME, []), "action": Column.of(STRING, [])},
        request_ms=10 * DAY_MS,
        item_ids=np.arange(4),
        item={
            "birth_ms": Column.of(TIME, [3 * DAY_MS // 2, 10 * DAY_MS, 11 * DAY_MS, None]),
            "content": Column.of(FeatureType("vector", width=CONTENT_WIDTH), [vector, vector, vector, None]),
        },
    )
    assert values["item_age_days"].to_pylist() == [8.5, 0.0, 0.0, -1.0], "born after the request: 0; unknown: -1"
    assert np.array_equal(values["content"].values, [vector, vector, vector, [0.0] * CONTENT_WIDTH])


def test_labelled_requests_of_a_world_carry_them(tmp_path: Path) -> None:
    write_world(WORLD, tmp_path, "world")
    label_dataset(open_dataset(tmp_path / "world"), LabelConfig(labels=(Label("click", 3_600_000),)), quiet=True)
    own = load_features("tackboard.recipes.ranking_features")
    config = RequestConfig(dataset=str(tmp_path / "world"), max_history=8)
    source = RequestSource(config, features=lambda names: own.merged(standard_features(names, 8)))
    steps = RequestSteps(source, config, HashConfig(num_hashes=2, num_rows=64), seed=0)
    batch = steps[0]
    items = source.dataset.read_items().to_pydict()
    place = {item: number for number, item in enumerate(items["item_id"])}
    rows = [place[item] for item in batch.histories.item_ids[batch.candidates].tolist()]
    births = np.array(items["birth_ms"])[rows]
    ages = np.maximum(batch.expand(batch.request_ms).numpy() - births, 0) / DAY_MS
    assert np.allclose(batch.features["item_age_days"].numpy(), ages, atol=1e-4) and len(set(births.tolist())) > 5
    assert np.array_equal(batch.features["content"].numpy(), np.array(items["content"], dtype=np.float32)[rows])
