"""This module generates the events, requests and candidates of a synthetic world from a world config.

Users have interests that drift, a taste for styles and their own pace. Items have topics, styles, popularity, births
and links. docs/synthetic-world.md describes the process, and `oracle.py` computes its exact next-item probabilities.
Decided: every random draw is a function of the seed and a key, such as (purpose, user, event index). So a user's events
do not depend on other users, and users can be generated alone or in chunks of any size. The same config gives the same
bytes forever. The code loops over event indices, and draws the events of one index for all users at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tackboard.core.keyed_random import normal, uniform
from tackboard.core.progress import Progress
from tackboard.events.synthetic.world_config import HIDE, WorldConfig
from tackboard.events.synthetic.world_items import DAY_MS, Floats, Ints, WorldItems, pick

USERS_PER_CHUNK = 32_768
SESSION_GAP_MS = 30 * 60 * 1000
"""A gap that is longer than this starts a new session. Gaps inside a session are at most 25 minutes."""
REPEAT, LINK, TOPIC, EXPLORE = range(4)

_USER_EVENTS, _USER_START, _USER_SPAN, _USER_TOPIC, _USER_STYLE, _EVENT = range(100, 106)
_DRAWS = (
    "session", "gap", "gap2", "drift", "drift_slot", "drift_near", "drift_topic", "switch", "topic_slot",
    "action", "surface", "position", "late", "delay",
)  # fmt: skip
_COLUMN = {name: column for column, name in enumerate(_DRAWS)}
_ITEM_DRAWS = 4
"""Number of uniform draws per item: one for the mechanism, one for a repeat, link or exploration, two for the topic."""


@dataclass
class LatentState:
    """The state just before a user's next event is drawn. Each row is a user. Times are ms after the world's start."""

    user: Ints
    """User numbers, from 0."""
    time: Ints
    """Time of the event."""
    new_session: np.ndarray
    """Whether the event opens a session."""
    slots: Ints
    """Topic of each of the user's interests (slots). If an interest drifts at this event, this is the old topic."""
    session_topic: Ints
    """Topic of the session. If it switches at this event, this is the old topic. Unused if new_session is true."""
    affinity: Floats
    """The user's affinity to each style."""
    recent: Ints
    """The user's last repeat_window items, oldest first. There are fewer columns if the user has had fewer events."""
    recent_hidden: np.ndarray
    """Mask of the recent events that were hides."""

    def take(self, rows: Ints | slice) -> LatentState:
        return LatentState(**{name: value[rows] for name, value in vars(self).items()})


@dataclass
class WorldEvents:
    """All events of some users, sorted by (user, event index). Item numbers begin at 0. Times are ms from the start."""

    user: Ints
    index: Ints
    item: Ints
    mechanism: Ints
    action: Ints
    surface: Ints
    time: Ints
    received: Ints
    position: Ints
    candidates: Ints
    """Items drawn as further candidates of each event [num_events, num_candidates - 1]. There may be duplicates."""


def num_events_of(config: WorldConfig, users: Ints) -> Ints:
    """Returns the number of events of each user."""
    spread = config.events_spread * normal(config.seed, _USER_EVENTS, users)
    count = np.floor(config.median_events * np.exp(spread)).astype(np.int64)
    return np.clip(count, config.min_events, config.max_events)


def generate(config: WorldConfig, catalogue: WorldItems | None = None, *, quiet: bool = True) -> WorldEvents:
    """Generates all events of a world, one chunk of users at a time. If the catalogue turns over, events after the
    last users' arrival are left out, because no items are born then.
    """
    catalogue = catalogue or WorldItems(config)
    users = np.arange(config.num_users, dtype=np.int64)
    chunks = []
    total = int(num_events_of(config, users).sum())
    with Progress("generating events", total=total, unit="events", quiet=quiet) as progress:
        for start in range(0, config.num_users, USERS_PER_CHUNK):
            chunks.append(simulate(config, catalogue, users[start : start + USERS_PER_CHUNK]))
            progress.advance(len(chunks[-1].user))
    columns = {name: np.concatenate([vars(chunk)[name] for chunk in chunks]) for name in vars(chunks[0])}
    if config.turns_over:
        kept = columns["time"] < config.days_of_arrivals * DAY_MS
        columns = {name: values[kept] for name, values in columns.items()}
    return WorldEvents(**columns)


def simulate(
    config: WorldConfig,
    catalogue: WorldItems,
    users: Ints,
    *,
    num_events: Ints | None = None,
    observe: Callable[[int, LatentState], None] | None = None,
) -> WorldEvents:
    """Generates the first `num_events` events (by default all) of each of `users`.

    `observe(event_index, state)` is called before the events of each index are drawn, with the users who have an event
    of this index. Copy the state if you keep it, because its arrays are views, and the next step changes them.
    """
    limit = num_events_of(config, users) if num_events is None else num_events
    # Users with the most events come first. So the users who still have events are a prefix, and a slice needs no copy.
    order = np.argsort(-limit, kind="stable")
    walk = _Walk(config, catalogue, users[order], limit[order])
    for index in range(int(limit.max(initial=0))):
        walk.step(index, int(np.searchsorted(-walk.limit, -index)), observe)
    return walk.events()


class _Walk:
    """The users' states and the events drawn so far. Each row is a user. Users with the most events come first."""

    def __init__(self, config: WorldConfig, catalogue: WorldItems, users: Ints, limit: Ints) -> None:
        self.config, self.catalogue, self.users, self.limit = config, catalogue, users, limit
        seed, count = config.seed, len(users)
        length = int(limit.max(initial=0))
        period_ms = config.period_days * DAY_MS
        slots = np.arange(len(config.slot_weights))
        # Topics are numbered by popularity: topic 0 is the most popular.
        weights = (np.arange(config.num_topics) + 1.0) ** -config.topic_exponent
        cumulative = np.cumsum(weights / weights.sum())
        draws = uniform(seed, _USER_TOPIC, users[:, None], slots)
        self.slots: Ints = np.searchsorted(cumulative, draws, side="right")
        bells = normal(seed, _USER_STYLE, users[:, None], np.arange(config.num_styles))
        self.affinity = np.exp(config.style_spread * bells)
        self.time: Ints = np.floor(uniform(seed, _USER_START, users) * 0.6 * period_ms).astype(np.int64)
        sessions = num_events_of(config, users) / config.mean_session_events + 1
        self.mean_pause_ms = (period_ms - self.time) * (0.2 + 0.4 * uniform(seed, _USER_SPAN, users)) / sessions
        self.session_topic: Ints = np.zeros(count, dtype=np.int64)
        self.topic_share = np.array(config.slot_weights)
        self.log = {name: np.zeros((count, length), dtype=np.int64) for name in _LOGGED}
        self.hidden = np.zeros((count, length), dtype=bool)
        self.candidates = np.zeros((count, length, config.num_candidates - 1), dtype=np.int32)

    def step(self, index: int, active: int, observe: Callable[[int, LatentState], None] | None) -> None:
        """Draws event `index` of the first `active` users."""
        config, row = self.config, slice(0, active)
        num_draws = len(_DRAWS) + _ITEM_DRAWS * config.num_candidates
        draws = uniform(config.seed, _EVENT, self.users[row, None], index, np.arange(num_draws))
        state = self._arrive(index, row, draws)
        if observe is not None:
            observe(index, state)
        self._settle_topic(index, row, state, draws)
        topic = self.session_topic[row]
        first = len(_DRAWS)
        item, mechanism = draw_items(config, self.catalogue, state, topic, draws[:, first : first + _ITEM_DRAWS])
        if config.num_candidates > 1:
            others = np.repeat(np.arange(active), config.num_candidates - 1)
            other_draws = draws[:, first + _ITEM_DRAWS :].reshape(-1, _ITEM_DRAWS)
            shown, _ = draw_items(config, self.catalogue, state.take(others), topic[others], other_draws)
            self.candidates[row, index] = shown.reshape(active, -1)
        self._react(index, row, draws, item, mechanism)

    def _arrive(self, index: int, row: slice, draws: Floats) -> LatentState:
        """Moves the clock to the event. Returns the state at this time."""
        config = self.config
        new_session = draws[:, _COLUMN["session"]] < 1.0 / config.mean_session_events
        if index == 0:
            new_session[:] = True
        else:
            radius = np.sqrt(-2.0 * np.log1p(-draws[:, _COLUMN["gap"]]))
            bell = radius * np.cos(2.0 * np.pi * draws[:, _COLUMN["gap2"]])
            inside = np.clip(1000.0 * config.gap_seconds * np.exp(config.gap_spread * bell), 1_000.0, 1_500_000.0)
            pause = SESSION_GAP_MS + 1000.0 - np.log1p(-draws[:, _COLUMN["gap"]]) * self.mean_pause_ms[row]
            self.time[row] += np.floor(np.where(new_session, pause, inside)).astype(np.int64)
        window = slice(max(0, index - config.repeat_window), index)
        return LatentState(
            user=self.users[row],
            time=self.time[row],
            new_session=new_session,
            slots=self.slots[row],
            session_topic=self.session_topic[row],
            affinity=self.affinity[row],
            recent=self.log["item"][row, window],
            recent_hidden=self.hidden[row, window],
        )

    def _settle_topic(self, index: int, row: slice, state: LatentState, draws: Floats) -> None:
        """Lets one interest drift at some session starts. Draws a topic for sessions that start or switch."""
        config = self.config
        drifting = np.flatnonzero(state.new_session & (draws[:, _COLUMN["drift"]] < config.drift_probability))
        slot = (draws[drifting, _COLUMN["drift_slot"]] * len(config.slot_weights)).astype(np.int64)
        # An interest that drifts moves one step on the ring of topics, or to any topic.
        choice = draws[drifting, _COLUMN["drift_topic"]]
        near = self.slots[drifting, slot] + np.where(choice < 0.5, -1, 1)
        anywhere = np.floor(choice * config.num_topics).astype(np.int64)
        go_near = draws[drifting, _COLUMN["drift_near"]] < config.drift_near_share
        self.slots[drifting, slot] = np.where(go_near, near % config.num_topics, anywhere)
        chance = switch_probability(config, state)
        anew = np.flatnonzero(state.new_session | (draws[:, _COLUMN["switch"]] < chance))
        share = np.broadcast_to(self.topic_share, (len(anew), len(self.topic_share)))
        chosen = pick(share, draws[anew, _COLUMN["topic_slot"]])
        self.session_topic[anew] = self.slots[anew, chosen]

    def _react(self, index: int, row: slice, draws: Floats, item: Ints, mechanism: Ints) -> None:
        """Draws action, surface, position and delay, and records the event."""
        config = self.config
        actions = np.array([config.engaged_actions, config.explored_actions])[(mechanism == EXPLORE).astype(int)]
        by_mechanism = (config.repeat_surfaces, config.link_surfaces, config.topic_surfaces, config.explore_surfaces)
        late = draws[:, _COLUMN["late"]] < config.late_share
        wait = -np.log1p(-draws[:, _COLUMN["delay"]]) * np.where(late, 6 * 3_600_000.0, 800.0)
        action = pick(actions, draws[:, _COLUMN["action"]])
        self.hidden[row, index] = action == HIDE
        written = {
            "item": item,
            "mechanism": mechanism,
            "action": action,
            "surface": pick(np.array(by_mechanism)[mechanism], draws[:, _COLUMN["surface"]]),
            "time": self.time[row],
            "received": self.time[row] + 20 + np.floor(wait).astype(np.int64),
            "position": self._position(index, row, item, draws[:, _COLUMN["position"]]),
        }
        for name, values in written.items():
            self.log[name][row, index] = values

    def _position(self, index: int, row: slice, item: Ints, draw: Floats) -> Ints:
        """Draws the position of the event's item among the distinct shown items. Position p has weight 1 / (p + 1)."""
        shown = keep_distinct(item, self.candidates[row, index]).sum(axis=1) + 1
        places = np.arange(self.config.num_candidates)
        weights = np.where(places < shown[:, None], 1.0 / (places + 1.0), 0.0)
        return pick(weights, draw)

    def events(self) -> WorldEvents:
        """Returns all events, ordered by (user, event index)."""
        users_in_order = np.argsort(self.users, kind="stable")
        reached = np.arange(self.log["item"].shape[1]) < self.limit[users_in_order, None]
        user_row, index = np.nonzero(reached)
        rows = users_in_order[user_row]
        columns = {name: values[rows, index] for name, values in self.log.items()}
        return WorldEvents(
            user=self.users[rows], index=index, candidates=self.candidates[rows, index].astype(np.int64), **columns
        )


_LOGGED = ("item", "mechanism", "action", "surface", "time", "received", "position")


def draw_items(
    config: WorldConfig, catalogue: WorldItems, state: LatentState, topic: Ints, draws: Floats
) -> tuple[Ints, Ints]:
    """Draws one item per row. Returns the items and the mechanisms that gave them. `draws` holds uniforms [M, 4].

    The mechanism is a repeat, a link, an exploration or a draw from the session's topic. A repeat becomes a draw from
    the topic if there is nothing to repeat. So does a link at a session start, after a hide, or to an unborn item.
    """
    mechanism = np.full(len(topic), TOPIC, dtype=np.int64)
    wanted = draws[:, 0]
    up_to_repeat = config.repeat_probability
    up_to_link = up_to_repeat + config.link_probability
    up_to_explore = up_to_link + config.explore_probability
    item = catalogue.draw_from_topic(topic, state.affinity, state.time, draws[:, 2:4])

    weights = repeat_weights(config, state)
    rows = np.flatnonzero((wanted < up_to_repeat) & (weights > 0).any(axis=1))
    if len(rows):
        item[rows] = state.recent[rows, pick(weights[rows], draws[rows, 1])]
        mechanism[rows] = REPEAT

    rows = np.flatnonzero((wanted >= up_to_repeat) & (wanted < up_to_link) & link_open(state))
    if len(rows):
        links = catalogue.successors[state.recent[rows, -1]]
        shares = np.broadcast_to(np.array(config.link_weights[: links.shape[1]]), links.shape)
        target = links[np.arange(len(rows)), pick(shares, draws[rows, 1])]
        born = catalogue.birth[target] <= state.time[rows]
        item[rows[born]] = target[born]
        mechanism[rows[born]] = LINK

    rows = np.flatnonzero((wanted >= up_to_link) & (wanted < up_to_explore))
    item[rows] = catalogue.draw_popular(state.time[rows], draws[rows, 1])
    mechanism[rows] = EXPLORE
    return item, mechanism


def repeat_weights(config: WorldConfig, state: LatentState) -> Floats:
    """Returns the weights [M, window] with which a repeat picks each recent event. Hides have weight 0."""
    ages = np.arange(state.recent.shape[1], 0, -1)
    return np.where(state.recent_hidden, 0.0, config.repeat_decay**ages)


def link_open(state: LatentState) -> np.ndarray:
    """Returns a mask of the rows that can follow a link: inside a session, after an event that was not a hide."""
    if state.recent.shape[1] == 0:
        return np.zeros(len(state.user), dtype=bool)
    return np.asarray(~state.new_session & ~state.recent_hidden[:, -1])


def switch_probability(config: WorldConfig, state: LatentState) -> Floats:
    """Returns the chance that a session's topic is drawn again before this event. It is unused at a session start."""
    if state.recent.shape[1] == 0:
        return np.ones(len(state.user))
    hidden = state.recent_hidden[:, -1]
    return np.where(hidden, config.switch_after_hide_probability, config.switch_probability)


def keep_distinct(item: Ints, candidates: np.ndarray) -> np.ndarray:
    """Returns a mask [M, C] of the candidates that differ from the event's item and from all earlier candidates."""
    keep = candidates != item[:, None]
    for column in range(1, candidates.shape[1]):
        keep[:, column] &= (candidates[:, :column] != candidates[:, column : column + 1]).all(axis=1)
    return np.asarray(keep)
