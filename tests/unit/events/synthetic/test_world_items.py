from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tackboard.core.keyed_random import uniform
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_items import CONTENT_WIDTH, WorldItems, pick

CONFIG = WorldConfig(num_items=90, num_topics=6, born_later_share=0.5, zipf_offset=2.0)
TURNOVER = dataclasses.replace(CONFIG, item_half_life_hours=100.0)
EXTREME = dataclasses.replace(CONFIG, item_half_life_hours=2.0)
"""The first item's weight is 2^-860 of that of an equal item that is born last."""
DRAWS = 200_000
WORLDS = pytest.mark.parametrize("config", [CONFIG, TURNOVER, EXTREME], ids=["eternal", "turnover", "extreme"])


def uniforms(purpose: int, *shape: int) -> np.ndarray:
    return uniform(99, purpose, np.arange(int(np.prod(shape))).reshape(shape))


def test_every_topic_has_items_and_one_from_the_start() -> None:
    catalogue = WorldItems(CONFIG)
    assert np.bincount(catalogue.topic).tolist() == [15] * 6
    assert set(catalogue.topic[catalogue.birth == 0]) == set(range(6))
    assert 0.3 < (catalogue.birth > 0).mean() < 0.7
    assert catalogue.style.min() >= 0
    assert catalogue.style.max() < CONFIG.num_styles


def test_successors_are_distinct_items_of_the_same_topic() -> None:
    for config in (CONFIG, WorldConfig(num_items=83, num_topics=20), WorldConfig()):
        catalogue = WorldItems(config)
        items = np.arange(config.num_items)
        assert (catalogue.topic[catalogue.successors] == catalogue.topic[:, None]).all()
        together = np.sort(np.concatenate([items[:, None], catalogue.successors], axis=1), axis=1)
        assert (np.diff(together, axis=1) > 0).all()
    assert np.bincount(WorldItems(WorldConfig()).successors[:, 0]).max() < 10, "no successor is favoured by its place"


def appeal(config: WorldConfig, catalogue: WorldItems, moment: int) -> np.ndarray:
    """The law in its plain form: the weight by rank, halved every half-life after the birth, or 0 before the birth."""
    base = WorldItems(dataclasses.replace(config, item_half_life_hours=0.0)).weight
    age_hours = (moment - catalogue.birth) / 3_600_000
    halvings = age_hours / config.item_half_life_hours if config.turns_over else 0.0 * age_hours
    return np.where(age_hours >= 0, base * 0.5 ** (halvings - halvings[age_hours >= 0].min()), 0.0)


@WORLDS
def test_draws_from_a_topic_follow_weight_affinity_and_birth(config: WorldConfig) -> None:
    catalogue = WorldItems(config)
    for moment in (0, int(np.median(catalogue.birth[catalogue.birth > 0])), int(2 * catalogue.birth.max())):
        for topic in (0, 2, 5):
            _compare_topic(config, catalogue, moment, topic)


def _compare_topic(config: WorldConfig, catalogue: WorldItems, moment: int, topic: int) -> None:
    affinity = np.array([1.0, 3.0, 0.5, 0.1])
    in_topic = catalogue.topic == topic
    expected = appeal(config, catalogue, moment) * affinity[catalogue.style] * in_topic
    expected /= expected.sum()
    drawn = catalogue.draw_from_topic(
        np.full(DRAWS, topic), np.tile(affinity, (DRAWS, 1)), np.full(DRAWS, moment), uniforms(1, DRAWS, 2)
    )
    share = np.bincount(drawn, minlength=90) / DRAWS
    assert (share[expected == 0] == 0).all()
    assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / DRAWS)


@WORLDS
def test_popular_draws_follow_the_weights_of_the_alive(config: WorldConfig) -> None:
    catalogue = WorldItems(config)
    for moment in (0, int(catalogue.birth.max())):
        expected = appeal(config, catalogue, moment)
        expected /= expected.sum()
        share = np.bincount(catalogue.draw_popular(np.full(DRAWS, moment), uniforms(2, DRAWS)), minlength=90) / DRAWS
        assert (share[expected == 0] == 0).all()
        assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / DRAWS)


def test_a_catalogue_that_turns_over_is_in_full_swing_from_the_start() -> None:
    config = dataclasses.replace(CONFIG, num_items=20_000, item_half_life_hours=100.0)
    catalogue = WorldItems(config)
    days = catalogue.birth / 86_400_000
    assert -config.days_of_births + config.days_of_arrivals - 0.1 < days.min() < days.max() <= config.days_of_arrivals
    per_day = np.histogram(days, bins=np.arange(-36, 37, 6))[0]
    assert per_day.std() / per_day.mean() < 0.05, "items are born at a constant rate, before the start and after it"


def test_no_topic_is_ever_empty_in_a_catalogue_that_turns_over() -> None:
    config = WorldConfig(num_items=40, num_topics=10, born_later_share=1.0, item_half_life_hours=1.0)
    catalogue = WorldItems(config)
    assert np.bincount(catalogue.topic[catalogue.birth <= 0], minlength=10).tolist() == [1] * 10
    topic = np.arange(1000) % 10
    for moment in (0, 10**7, 10**12):
        drawn = catalogue.draw_from_topic(
            topic, np.ones((1000, config.num_styles)), np.full(1000, moment), uniforms(4, 1000, 2)
        )
        assert (catalogue.topic[drawn] == topic).all()
        assert (catalogue.birth[drawn] <= moment).all()


def test_links_lead_to_items_born_shortly_before_if_the_catalogue_turns_over() -> None:
    config = dataclasses.replace(CONFIG, num_items=2000, item_half_life_hours=100.0)
    catalogue = WorldItems(config)
    items = np.arange(2000)
    together = np.sort(np.concatenate([items[:, None], catalogue.successors], axis=1), axis=1)
    assert (np.diff(together, axis=1) > 0).all(), "successors are distinct, and none is the item itself"
    assert (catalogue.topic[catalogue.successors] == catalogue.topic[:, None]).all()
    older_hours = (catalogue.birth[:, None] - catalogue.birth[catalogue.successors]) / 3_600_000
    assert (older_hours >= 0).mean() > 0.95, "only a topic's oldest items link to its newest"
    assert (older_hours[older_hours >= 0] < 200).mean() > 0.95


def test_an_item_is_alive_at_the_moment_of_its_birth() -> None:
    catalogue = WorldItems(CONFIG)
    moment = int(catalogue.birth.max())
    newest = int(catalogue.birth.argmax())
    for time, found in ((moment, True), (moment - 1, False)):
        drawn = catalogue.draw_popular(np.full(DRAWS, time), uniforms(3, DRAWS))
        assert (newest in set(drawn.tolist())) is found


def test_pick_never_takes_a_column_of_weight_zero() -> None:
    weights = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    almost_one = np.nextafter(1.0, 0.0)
    assert pick(weights, np.array([0.0, 0.5])).tolist() == [1, 2]
    assert pick(weights, np.array([almost_one, almost_one])).tolist() == [1, 2]
    assert pick(weights, np.array([1.0, 1.0])).tolist() == [1, 2]


def test_the_content_of_an_item_tells_its_topic_and_style_but_not_exactly() -> None:
    catalogue = WorldItems(WorldConfig())
    content = catalogue.content(WorldConfig())
    assert content.shape == (2000, CONTENT_WIDTH) and np.allclose(np.linalg.norm(content, axis=1), 1.0, atol=1e-6)
    likeness = content @ content.T
    same_topic = catalogue.topic[:, None] == catalogue.topic
    same_style = catalogue.style[:, None] == catalogue.style
    itself = np.eye(2000, dtype=bool)
    means = [likeness[chosen & ~itself].mean() for chosen in (same_topic & same_style, same_topic, ~same_topic)]
    assert means[0] > means[1] + 0.05 > means[2] + 0.4
    assert likeness[same_topic & same_style & ~itself].max() < 0.999, "no two items have the same content"
    assert np.array_equal(content, WorldItems(WorldConfig()).content(WorldConfig()))
    assert not np.array_equal(content, catalogue.content(WorldConfig(seed=2)))
