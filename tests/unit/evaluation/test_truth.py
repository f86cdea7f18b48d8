"""The oracle's row: the world's own probabilities, in the catalogue's order."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.truth import oracle
from tackboard.events.synthetic.oracle import oracle_item_ids, oracle_scores
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

WORLD = WorldConfig(num_users=8, num_items=30, num_topics=4, median_events=8.0, max_events=15)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    root = tmp_path_factory.mktemp("worlds")
    write_world(WORLD, root, "small")
    return load_sequences(root / "small", ("click", "save", "share"))


def test_real_data_has_no_oracle(tiny_sequences: Sequences) -> None:
    assert oracle(tiny_sequences) is None


def test_scores_are_the_probabilities_of_the_held_out_event(world: Sequences) -> None:
    score = oracle(world)
    assert score is not None
    users = np.flatnonzero(world.targets >= 0)[::-1]
    scores = score(JudgedEvents(users, world.targets[users]))
    assert scores.sum(axis=1) == pytest.approx(np.ones(len(users)))
    columns = {item: column for column, item in enumerate(oracle_item_ids(WORLD).tolist())}
    for row, user in enumerate(users):
        index = int(world.targets[user] - world.offsets[user])
        exact = oracle_scores(WORLD, world.user_ids[[user]], index, given_kept=True)[0]
        for place, item in enumerate(world.catalogue.tolist()):
            assert scores[row, place] == pytest.approx(exact[columns[item]])


def test_columns_follow_the_catalogue(world: Sequences) -> None:
    source = copy.copy(world.source)
    source.catalogue = world.catalogue[1::2]
    half = dataclasses.replace(world, source=source)
    whole_scores, half_scores = oracle(world), oracle(half)
    assert whole_scores is not None
    assert half_scores is not None
    users = np.flatnonzero(world.targets >= 0)
    judged = JudgedEvents(users, world.targets[users])
    assert np.array_equal(half_scores(judged), whole_scores(judged)[:, 1::2])


def _chances_of_what_happened(world: Sequences) -> np.ndarray:
    score = oracle(world)
    assert score is not None
    users = np.flatnonzero(world.targets >= 0)
    columns = np.searchsorted(world.catalogue, world.item_ids[world.targets[users]])
    return np.asarray(score(JudgedEvents(users, world.targets[users])))[np.arange(len(users)), columns]


def test_what_happened_was_possible(world: Sequences) -> None:
    assert (_chances_of_what_happened(world) > 0).all()


def test_what_happened_in_a_world_that_turns_over_was_likely(tmp_path: Path) -> None:
    """The log lacks the last events of many users, so the numbers of the events must be those of the whole world."""
    config = dataclasses.replace(WORLD, num_users=200, num_items=300, item_half_life_hours=24.0, born_later_share=0.9)
    write_world(config, tmp_path, "turnover")
    chances = _chances_of_what_happened(load_sequences(tmp_path / "turnover", ("click", "save", "share")))
    assert (chances > 0).all()
    assert np.median(chances) > 10 / config.num_items
