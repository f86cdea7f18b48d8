"""The oracle is right when what happens agrees with what it says, over many users, and wrong oracles are found out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.events.synthetic.oracle import latent_states, oracle_item_ids, oracle_scores, score_state
from tackboard.events.synthetic.world import LatentState, num_events_of, simulate
from tackboard.events.synthetic.world_config import HIDE, WorldConfig
from tackboard.events.synthetic.world_items import WorldItems

# Few items and strong mechanisms, so that a few thousand users tell a right oracle from a wrong one.
CONFIG = WorldConfig(
    num_users=12_000,
    num_items=60,
    num_topics=6,
    median_events=12.0,
    events_spread=0.4,
    max_events=24,
    born_later_share=0.4,
    repeat_probability=0.2,
    repeat_decay=0.7,
    link_probability=0.35,
    mean_session_events=4.0,
    drift_probability=0.6,
    switch_probability=0.1,
    explored_actions=(0.2, 0.1, 0.1, 0.6),
)
TURNOVER = dataclasses.replace(CONFIG, born_later_share=0.6, item_half_life_hours=200.0)
LIMIT = 4.5
"""Standard errors that a right oracle stays within; of about sixty tested at once, chance exceeds it 1 in 2,500."""
NUM_FEATURES = 42


@functools.cache
def happened(world: WorldConfig) -> tuple[list, np.ndarray, np.ndarray, WorldItems]:
    """Latent states before one event of every user (spread over all indices), the item that came and its action."""
    catalogue = WorldItems(world)
    users = np.arange(world.num_users)
    index = (users * 7919) % num_events_of(world, users)
    events = simulate(world, catalogue, users)
    row = np.searchsorted(events.user, users) + index
    return latent_states(world, catalogue, users, index), events.item[row], events.action[row], catalogue


def features(state: LatentState, catalogue: WorldItems) -> list[np.ndarray]:
    """Functions of (state, item) [U, num_items], each sensitive to one mechanism.

    Under the right probabilities every one of them averages, over what happened, to what the oracle expects. A blind
    oracle can be calibrated on the whole; it cannot be so for the feature it is blind to.
    """
    shape = (len(state.user), len(catalogue.weight))
    rows = np.arange(shape[0])[:, None]
    recent, link = np.zeros(shape), [np.zeros(shape) for _ in range(3)]
    np.add.at(recent, (np.broadcast_to(rows, state.recent.shape), state.recent), 1.0)
    newest = np.zeros(shape)
    after_hide = np.zeros((shape[0], 1))
    if state.recent.shape[1]:
        newest[rows[:, 0], state.recent[:, -1]] = 1.0
        after_hide = state.recent_hidden[:, -1:].astype(float)
        for place, found in enumerate(link):
            found[rows[:, 0], catalogue.successors[state.recent[:, -1], place]] = 1.0
    in_topic = (catalogue.topic == state.session_topic[:, None]).astype(float)
    slots = [(catalogue.topic == state.slots[:, [k]]).astype(float) for k in range(state.slots.shape[1])]
    near = (np.abs(catalogue.topic - state.slots[:, [0]]) == 1).astype(float)
    taste = np.log(state.affinity)[:, catalogue.style]
    young = (catalogue.birth > state.time[:, None] - 10 * 86_400_000) & (catalogue.birth > 0)
    start = state.new_session[:, None].astype(float)
    popular = np.broadcast_to(np.log(catalogue.weight), shape)
    plain = [recent, newest, *link, in_topic, *slots, near, taste, young.astype(float), popular]
    return plain + [feature * start for feature in plain] + [feature * after_hide for feature in plain]


def deviations(
    config: WorldConfig, *, world: WorldConfig = CONFIG, given_kept: bool = False, change: dict | None = None
) -> list[float]:
    """Standard errors between what happened in `world` and an oracle that believes in `config` and, by `change`, in
    other states.

    First of the mean log-likelihood against the oracle's own entropy, then of the hits in bins of probability over all
    (user, item) pairs, then of the features above.
    """
    groups, item, action, catalogue = happened(world)
    believed_catalogue = WorldItems(config)
    scores = np.empty((CONFIG.num_users, CONFIG.num_items))
    expected, spread, seen = (np.zeros((CONFIG.num_users, NUM_FEATURES)) for _ in range(3))
    for rows, state in groups:
        believed = dataclasses.replace(state, **{name: make(state) for name, make in (change or {}).items()})
        scores[rows] = score_state(config, believed_catalogue, believed, given_kept=given_kept)
        for number, feature in enumerate(features(state, catalogue)):
            expected[rows, number] = (scores[rows] * feature).sum(axis=1)
            spread[rows, number] = (scores[rows] * feature**2).sum(axis=1) - expected[rows, number] ** 2
            seen[rows, number] = feature[np.arange(len(rows)), item[rows]]
    users = np.flatnonzero(action != HIDE) if given_kept else np.arange(CONFIG.num_users)
    scores, item = scores[users], item[users]
    realised = scores[np.arange(len(users)), item]
    if (realised <= 0).any():
        return [np.inf]
    found = _standard_errors((seen - expected)[users], spread[users])
    logs = np.log(np.where(scores > 0, scores, 1.0))
    entropy = -(scores * logs).sum(axis=1)
    variance = (scores * logs**2).sum(axis=1) - entropy**2
    found += _standard_errors((np.log(realised) + entropy)[:, None], variance[:, None])
    edges = np.quantile(scores[scores > 0], np.linspace(0, 1, 13)[1:-1])
    bins = np.digitize(scores, edges)
    for number in range(len(edges) + 1):
        mass = np.where(bins == number, scores, 0.0).sum(axis=1)
        hit = bins[np.arange(len(users)), item] == number
        found += _standard_errors((hit - mass)[:, None], (mass * (1 - mass))[:, None])
    return found


def _standard_errors(residuals: np.ndarray, variances: np.ndarray) -> list[float]:
    total = np.sqrt(variances.sum(axis=0))
    return np.abs(np.divide(residuals.sum(axis=0), total, out=np.zeros_like(total), where=total > 1e-9)).tolist()


@pytest.mark.parametrize("world", [CONFIG, TURNOVER], ids=["eternal", "turnover"])
def test_what_happens_agrees_with_the_oracle(world: WorldConfig) -> None:
    assert max(deviations(world, world=world)) < LIMIT


@pytest.mark.parametrize("half_life", [100.0, 400.0])
def test_an_oracle_with_another_half_life_is_found_out(half_life: float) -> None:
    assert max(deviations(dataclasses.replace(TURNOVER, item_half_life_hours=half_life), world=TURNOVER)) > LIMIT


def test_what_happens_without_hides_agrees_with_the_oracle_that_is_told() -> None:
    assert max(deviations(CONFIG, given_kept=True)) < LIMIT
    assert max(deviations(dataclasses.replace(CONFIG, explored_actions=(1.0, 0.0, 0.0, 0.0)), given_kept=True)) > LIMIT


@pytest.mark.parametrize(
    "blind",
    [
        {"repeat_probability": 0.0},
        {"repeat_decay": 1.0},
        {"link_probability": 0.0},
        {"link_weights": (0.2, 0.3, 0.5)},
        {"explore_probability": 0.02},
        {"drift_probability": 0.0},
        {"switch_probability": 0.0},
        {"switch_after_hide_probability": 0.1},
        {"slot_weights": (0.1, 0.15, 0.25, 0.5)},
    ],
    ids=lambda blind: next(iter(blind)),
)
def test_an_oracle_blind_to_one_mechanism_is_found_out(blind: dict) -> None:
    assert max(deviations(dataclasses.replace(CONFIG, **blind))) > LIMIT


@pytest.mark.parametrize(
    ("field", "believe"),
    [
        ("affinity", lambda state: np.ones_like(state.affinity)),
        ("time", lambda state: np.full_like(state.time, 10**12)),
        ("new_session", lambda state: np.ones_like(state.new_session)),
        ("recent_hidden", lambda state: np.zeros_like(state.recent_hidden)),
        ("slots", lambda state: state.slots[:, ::-1]),
    ],
)
def test_an_oracle_blind_to_one_part_of_the_state_is_found_out(field: str, believe: Callable) -> None:
    assert max(deviations(CONFIG, change={field: believe})) > LIMIT


def test_scores_are_probabilities_in_the_order_of_the_ids() -> None:
    scores = oracle_scores(CONFIG, np.array([5, 1, 5]), np.array([3, 0, 0]))
    assert scores.shape == (3, 60)
    assert scores.sum(axis=1) == pytest.approx(np.ones(3))
    assert oracle_item_ids(CONFIG).tolist() == list(range(100_000, 100_060))
    alone = oracle_scores(CONFIG, np.array([5]), 3)
    assert np.array_equal(alone[0], scores[0])


def test_chunks_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    users = np.arange(1, 40)
    whole = oracle_scores(CONFIG, users, 4)
    monkeypatch.setattr("tackboard.events.synthetic.oracle.ROWS_PER_CHUNK", 6)
    assert np.allclose(oracle_scores(CONFIG, users, 4), whole, rtol=1e-12, atol=0)


def test_users_and_events_outside_the_world_are_refused() -> None:
    for user, index in ((0, 0), (12_001, 0), (1, -1), (1, 24)):
        with pytest.raises(UsageError):
            oracle_scores(CONFIG, np.array([user]), index)
