"""The demo's recipe fits the demo's world."""

from __future__ import annotations

from tackboard.events.synthetic.world_config import ACTIONS, load_world_config
from tackboard.recipes.demo import demo


def test_it_predicts_every_action_of_the_world_but_hide() -> None:
    assert set(demo().data.positive_actions) == set(ACTIONS) - {"hide"}
    assert demo().data.dataset == "datasets/demo"


def test_its_table_is_smaller_than_it_could_be_and_collisions_of_whole_vectors_are_unlikely() -> None:
    hashing = demo().model.tables
    num_items = load_world_config("demo").num_items
    pairs = num_items * (num_items - 1) / 2
    assert pairs / hashing.num_rows**hashing.num_hashes < 1e-3
