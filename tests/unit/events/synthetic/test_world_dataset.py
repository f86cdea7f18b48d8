from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tackboard.core.config import from_dict
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.synthetic.world import generate
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import item_table, write_world
from tackboard.events.synthetic.world_items import WorldItems

CONFIG = WorldConfig(num_users=60, num_items=240, num_topics=8)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(write_world(CONFIG, tmp_path_factory.mktemp("world"), "small"))


def test_a_world_becomes_a_dataset_that_names_its_truth(dataset: Dataset) -> None:
    truth = dataset.read_truth()
    assert truth is not None
    assert from_dict(WorldConfig, truth) == CONFIG
    assert dataset.num_items == 240
    assert dataset.num_users == 60
    assert dataset.actions == ["click", "hide", "save", "share"]
    assert {"topic", "style", "birth_ms"} <= set(dataset.read_items().column_names)
    events = generate(CONFIG)
    assert dataset.read_events(["item_id"])["item_id"].to_pylist() == (events.item + 100_000).tolist()


def test_the_order_of_arrival_is_that_of_the_received_times(dataset: Dataset) -> None:
    table = dataset.read_events()
    received, order = table["received_ms"].to_numpy(), table["order"].to_numpy()
    assert sorted(order.tolist()) == list(range(len(order)))
    assert (np.diff(received[np.argsort(order)]) >= 0).all()


def test_every_request_shows_the_engaged_item_at_its_position_and_no_item_twice(dataset: Dataset) -> None:
    events, impressions = dataset.read_events(), dataset.read_impressions()
    assert impressions is not None
    shown = list(zip(*(impressions[name].to_pylist() for name in ("request", "position", "item_id")), strict=True))
    engaged = set(zip(*(events[name].to_pylist() for name in ("request", "position", "item_id")), strict=True))
    assert engaged <= set(shown)
    assert len({(request, item) for request, _, item in shown}) == len(shown)
    positions: dict[int, list[int]] = {}
    for request, position, _ in shown:
        positions.setdefault(request, []).append(position)
    assert all(found == list(range(len(found))) for found in positions.values())
    assert len(positions) == events.num_rows
    assert 3 < len(shown) / len(positions) <= CONFIG.num_candidates


def test_a_request_may_show_a_single_item(tmp_path: Path) -> None:
    config = WorldConfig(num_users=5, num_items=240, num_topics=8, num_candidates=1)
    dataset = open_dataset(write_world(config, tmp_path, "single"))
    impressions = dataset.read_impressions()
    assert impressions is not None
    assert impressions.num_rows == dataset.num_events


def test_an_item_born_before_the_start_has_its_birth_in_the_item_table() -> None:
    config = dataclasses.replace(CONFIG, item_half_life_hours=24.0)
    catalogue = WorldItems(config)
    born = item_table(config, catalogue)["birth_ms"].to_numpy()
    assert (born - config.start_ms == catalogue.birth).all()
    assert born.min() < config.start_ms < born.max()


def test_a_world_that_turns_over_becomes_a_dataset_whose_truth_has_the_half_life(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, item_half_life_hours=24.0)
    dataset = open_dataset(write_world(config, tmp_path, "turnover"))
    truth = dataset.read_truth()
    assert truth is not None
    assert truth["item_half_life_hours"] == 24.0
    assert from_dict(WorldConfig, truth) == config
    assert dataset.num_events == len(generate(config).user)
