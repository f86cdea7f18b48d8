"""This module is the oracle of a synthetic world: it computes the exact probabilities of the next item.

The oracle knows the world's config and the latent state just before an event: the interests, the session's topic so
far, whether a session starts, the time, and the recent items. It does not know the random draws that follow. Its
probabilities are the closed form of `world.draw_items`, summed over the topics that the session may get. A model sees
only events, so no model can be expected to beat the oracle. Evaluation reports how close a model comes to the oracle.
"""

from __future__ import annotations

import numpy as np

from tackboard.core.errors import UsageError
from tackboard.events.synthetic.world import (
    LatentState,
    link_open,
    num_events_of,
    repeat_weights,
    simulate,
    switch_probability,
)
from tackboard.events.synthetic.world_config import FIRST_USER_ID, HIDE, WorldConfig
from tackboard.events.synthetic.world_items import Floats, Ints, WorldItems

ROWS_PER_CHUNK = 1024
"""Number of users that are scored at once. A smaller number needs less memory for temporary arrays."""


def oracle_item_ids(config: WorldConfig) -> Ints:
    """Returns the item id of each column of `oracle_scores`."""
    return WorldItems(config).ids


def oracle_scores(config: WorldConfig, user_ids: Ints, event_index: Ints | int, *, given_kept: bool = False) -> Floats:
    """Returns P(item of event `event_index` | latent state before the event): float64 [U, num_items], rows sum to 1.

    `event_index` is one index for all users, or one index per user. It counts all events of a user from 0, in
    order of time. With `given_kept`, the probabilities are conditional on the event not being a hide (an event with the
    action `hide`). Use this if the evaluation never ranks hides. A user or event that does not exist raises UsageError.
    """
    users = np.atleast_1d(np.asarray(user_ids, dtype=np.int64)) - FIRST_USER_ID
    index = np.broadcast_to(np.asarray(event_index, dtype=np.int64), users.shape)
    if len(users) and (users.min() < 0 or users.max() >= config.num_users):
        raise UsageError("a user id lies outside the world", allowed=f"allowed: 1 to {config.num_users}")
    if np.any(index < 0) or np.any(index >= num_events_of(config, users)):
        raise UsageError(
            "an event index lies outside a user's events", allowed="allowed: 0 to the number of events - 1"
        )
    catalogue = WorldItems(config)
    scores = np.empty((len(users), config.num_items))
    for start in range(0, len(users), ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        for chunk_rows, state in latent_states(config, catalogue, users[rows], index[rows]):
            scores[start + chunk_rows] = score_state(config, catalogue, state, given_kept=given_kept)
    return scores


def latent_states(
    config: WorldConfig, catalogue: WorldItems, users: Ints, index: Ints
) -> list[tuple[Ints, LatentState]]:
    """Finds, for each i, the state before event `index[i]` of user `users[i]`. Returns groups (values of i, states).

    All states of a group have the same event index, because their windows of recent items must be equally long.
    """
    groups: list[tuple[Ints, LatentState]] = []
    distinct = np.unique(users)

    def observe(step: int, state: LatentState) -> None:
        wanted = np.flatnonzero(index == step)
        if len(wanted):
            place = np.argsort(state.user)
            found = place[np.searchsorted(state.user, users[wanted], sorter=place)]
            groups.append((wanted, state.take(found)))

    last = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(last, np.searchsorted(distinct, users), index)
    simulate(config, catalogue, distinct, num_events=last + 1, observe=observe)
    return groups


def score_state(config: WorldConfig, catalogue: WorldItems, state: LatentState, *, given_kept: bool = False) -> Floats:
    """Returns P(item | state) as float64 [U, num_items]. This is the closed form of one draw of an item."""
    num_rows, rows = len(state.user), np.arange(len(state.user))
    alive = catalogue.birth[None, :] <= state.time[:, None]
    popularity = np.where(alive, catalogue.weight, 0.0)
    explored = popularity / popularity.sum(axis=1, keepdims=True)
    explored *= config.explore_probability

    weights = repeat_weights(config, state)
    total = weights.sum(axis=1, keepdims=True)
    can_repeat = total[:, 0] > 0
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) * config.repeat_probability
    engaged = np.zeros((num_rows, config.num_items))
    np.add.at(engaged, (np.broadcast_to(rows[:, None], share.shape), state.recent), share)
    # An item that is not a repeat, not a followed link and not explored is drawn from the session's topic.
    from_topic = 1.0 - config.explore_probability - np.where(can_repeat, config.repeat_probability, 0.0)

    linked = np.flatnonzero(link_open(state))
    if len(linked):
        links = catalogue.successors[state.recent[linked, -1]]
        link_share = np.array(config.link_weights[: links.shape[1]])
        born = catalogue.birth[links] <= state.time[linked, None]
        link_share = np.where(born, link_share / link_share.sum(), 0.0) * config.link_probability
        np.add.at(engaged, (np.broadcast_to(linked[:, None], links.shape), links), link_share)
        from_topic[linked] -= link_share.sum(axis=1)

    taste = popularity * state.affinity[:, catalogue.style]
    of_topic = np.zeros((config.num_items, config.num_topics))
    of_topic[np.arange(config.num_items), catalogue.topic] = 1.0
    per_weight = topic_probabilities(config, state) / (taste @ of_topic) * from_topic[:, None]
    engaged += taste * per_weight[:, catalogue.topic]
    if given_kept:
        engaged *= 1.0 - config.engaged_actions[HIDE]
        explored *= 1.0 - config.explored_actions[HIDE]
        scores = engaged + explored
        return np.asarray(scores / scores.sum(axis=1, keepdims=True))
    return np.asarray(engaged + explored)


def topic_probabilities(config: WorldConfig, state: LatentState) -> Floats:
    """Returns P(topic of the session at this event | state) [U, num_topics]. Accounts for drift and switches."""
    num_rows, rows = len(state.user), np.arange(len(state.user))
    kept = np.zeros((num_rows, config.num_topics))
    drifted = np.zeros((num_rows, config.num_topics))
    for slot, weight in enumerate(config.slot_weights):
        topic = state.slots[:, slot]
        kept[rows, topic] += weight
        for step in (-1, 1):
            drifted[rows, (topic + step) % config.num_topics] += weight * config.drift_near_share / 2
        drifted += weight * (1.0 - config.drift_near_share) / config.num_topics
    drift = config.drift_probability / len(config.slot_weights)
    at_start = (1.0 - drift) * kept + drift * drifted
    switch = switch_probability(config, state)[:, None]
    inside = switch * kept
    inside[rows, state.session_topic] += 1.0 - switch[:, 0]
    return np.asarray(np.where(state.new_session[:, None], at_start, inside))
