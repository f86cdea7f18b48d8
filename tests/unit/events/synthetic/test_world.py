from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from tackboard.events.synthetic import world
from tackboard.events.synthetic.oracle import oracle_scores
from tackboard.events.synthetic.world import (
    EXPLORE,
    LINK,
    REPEAT,
    SESSION_GAP_MS,
    WorldEvents,
    generate,
    num_events_of,
    simulate,
)
from tackboard.events.synthetic.world_config import FIRST_USER_ID, HIDE, WorldConfig, load_world_config
from tackboard.events.synthetic.world_items import WorldItems

SMALL = WorldConfig(num_users=80, num_items=240, num_topics=8)
FROZEN_SMALL = "ec03a4c6d66063e6864181e48d73c0ba498598bb09b995b468204846bb2ed9f4"
FROZEN_DEMO_USERS = "139ba917368729a97751708e807bba49ac97afbfbe8c8e6aafc78aab260588ca"


def digest(events: WorldEvents) -> str:
    sha = hashlib.sha256()
    for name, column in sorted(vars(events).items()):
        sha.update(name.encode() + np.ascontiguousarray(column, dtype="<i8").tobytes())
    return sha.hexdigest()


@pytest.fixture(scope="module")
def events() -> WorldEvents:
    """All events of SMALL."""
    return generate(SMALL)


def test_the_worlds_are_the_ones_that_models_were_compared_on(events: WorldEvents) -> None:
    message = (
        "the same config gives other events than before. Figures measured on them can no longer be compared: a change "
        "needs an entry in docs/log.md with the old and the new figures, and only then a new hash here"
    )
    assert digest(events) == FROZEN_SMALL, message
    demo = load_world_config("demo")
    assert digest(simulate(demo, WorldItems(demo), np.arange(50))) == FROZEN_DEMO_USERS, message


def test_neither_chunks_nor_other_users_change_anything_but_a_seed_does(
    events: WorldEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = simulate(SMALL, WorldItems(SMALL), np.array([41]), num_events=np.array([4]))
    assert alone.item.tolist() == events.item[events.user == 41][:4].tolist()
    assert alone.time.tolist() == events.time[events.user == 41][:4].tolist()
    monkeypatch.setattr(world, "USERS_PER_CHUNK", 30)
    assert digest(generate(SMALL)) == digest(events)
    assert digest(generate(dataclasses.replace(SMALL, seed=2))) != digest(events)


def test_events_are_ordered_and_sessions_are_told_by_their_gaps(events: WorldEvents) -> None:
    same = np.diff(events.user) == 0
    gaps = np.diff(events.time)[same]
    assert gaps.min() >= 1000
    assert not ((gaps > 1_500_000) & (gaps <= SESSION_GAP_MS)).any()
    counts = np.bincount(events.user)
    assert counts.tolist() == num_events_of(SMALL, np.arange(80)).tolist()
    assert counts.min() >= SMALL.min_events
    assert counts.max() <= SMALL.max_events
    assert (events.received > events.time).all()


def test_mechanisms_do_what_their_names_say_and_touch_nothing_before_its_birth(events: WorldEvents) -> None:
    catalogue = WorldItems(SMALL)
    assert (catalogue.birth[events.item] <= events.time).all()
    assert (catalogue.birth[events.candidates] <= events.time[:, None]).all()
    link = np.flatnonzero(events.mechanism == LINK)
    previous = events.item[link - 1]
    assert (catalogue.successors[previous] == events.item[link, None]).any(axis=1).all()
    assert (events.time[link] - events.time[link - 1] <= SESSION_GAP_MS).all()
    assert (events.action[link - 1] != HIDE).all()
    for row in np.flatnonzero(events.mechanism == REPEAT)[:200]:
        window = slice(row - min(events.index[row], SMALL.repeat_window), row)
        kept = events.item[window][events.action[window] != HIDE]
        assert events.item[row] in kept


def test_a_user_may_return_to_an_item_that_has_lost_its_appeal() -> None:
    config = dataclasses.replace(SMALL, item_half_life_hours=12.0, born_later_share=0.9, repeat_probability=0.3)
    events, catalogue = generate(config), WorldItems(config)
    age_hours = (events.time - catalogue.birth[events.item]) / 3_600_000
    assert age_hours.min() >= 0
    returned = age_hours[events.mechanism == REPEAT]
    assert returned.max() > 20 * config.item_half_life_hours


def test_the_log_ends_with_the_arrivals_if_the_catalogue_turns_over() -> None:
    config = dataclasses.replace(SMALL, item_half_life_hours=12.0, num_users=400)
    events, uncut = generate(config), simulate(config, WorldItems(config), np.arange(400))
    kept = uncut.time < config.days_of_arrivals * 86_400_000
    assert digest(events) == digest(WorldEvents(**{name: values[kept] for name, values in vars(uncut).items()}))
    assert 0.3 < kept.mean() < 0.9
    first = np.flatnonzero(np.diff(events.user, prepend=-1))
    assert (
        events.index == np.arange(len(events.user)) - np.repeat(first, np.diff(first, append=len(events.user)))
    ).all()


def test_in_a_world_that_turns_over_live_counts_beat_old_counts_and_the_oracle_beats_both() -> None:
    """The three facts that docs/synthetic-world.md states about the news world, on a smaller one."""
    config = dataclasses.replace(load_world_config("news"), num_users=800, num_items=1200, num_topics=6, period_days=15)
    events = generate(config)
    order = np.argsort(events.time, kind="stable")
    hours, item = events.time[order] / 3_600_000, events.item[order]
    end = 24 * config.days_of_arrivals
    first_seen = np.full(config.num_items, np.inf)
    np.minimum.at(first_seen, item, hours)
    last_day = hours >= end - 24
    assert (first_seen[item[last_day]] >= end - 48).mean() > 0.8
    asked = np.flatnonzero(hours >= end - 72)[::10]
    until = np.searchsorted(hours, hours[asked])

    def hit_rate(scores: np.ndarray) -> float:
        own = scores[np.arange(len(asked)), item[asked]][:, None]
        return float((((scores > own).sum(axis=1) < 10) & (own[:, 0] > 0)).mean())

    def counts_since(first: np.ndarray) -> np.ndarray:
        windows = zip(first, until, strict=True)
        return np.stack([np.bincount(item[a:b], minlength=config.num_items) for a, b in windows])

    live = hit_rate(counts_since(np.searchsorted(hours, hours[asked] - 6)))
    whole_past = hit_rate(counts_since(np.zeros_like(until)))
    row = order[asked]
    oracle = hit_rate(oracle_scores(config, FIRST_USER_ID + events.user[row], events.index[row]))
    assert oracle > live + 0.1 > whole_past + 0.2


def test_shares_of_mechanisms_actions_and_late_events() -> None:
    events = generate(dataclasses.replace(SMALL, num_users=1500))
    explored = events.mechanism == EXPLORE
    assert explored.mean() == pytest.approx(SMALL.explore_probability, abs=0.01)
    assert (events.action[explored] == HIDE).mean() == pytest.approx(SMALL.explored_actions[HIDE], abs=0.02)
    assert (events.action[~explored] == HIDE).mean() == pytest.approx(SMALL.engaged_actions[HIDE], abs=0.005)
    assert (events.received - events.time > 60_000).mean() == pytest.approx(SMALL.late_share, abs=0.005)


def test_a_hide_makes_the_session_change_its_topic() -> None:
    config = dataclasses.replace(SMALL, num_users=1500, explore_probability=0.3, switch_probability=0.02)
    events, catalogue = generate(config), WorldItems(config)
    inside = np.flatnonzero((np.diff(events.user) == 0) & (np.diff(events.time) <= SESSION_GAP_MS)) + 1
    usable = inside[(events.mechanism[inside] == world.TOPIC) & (events.index[inside] >= 2)]
    usable = usable[events.mechanism[usable - 2] == world.TOPIC]
    moved = catalogue.topic[events.item[usable]] != catalogue.topic[events.item[usable - 2]]
    after_hide = events.action[usable - 1] == HIDE
    assert moved[after_hide].mean() > moved[~after_hide].mean() + 0.15
