"""This module defines the config of a synthetic world, checks its parameters, and reads it from a JSON file.

`worlds/demo.json` holds the parameters of the demo world. They were chosen and frozen before any models were compared
on this world. A change of these parameters needs an entry in docs/log.md with the old and the new figures.
"""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path

from tackboard.core.config import check, did_you_mean, from_dict
from tackboard.core.errors import UsageError
from tackboard.core.files import read_json

ACTIONS = ("click", "save", "share", "hide")
SURFACES = ("home", "related", "search")
HIDE = ACTIONS.index("hide")
FIRST_USER_ID = 1
FIRST_ITEM_ID = 100_000
REQUESTS_PER_USER = 10_000
"""A request id is user id × this number + event index, so a user must have fewer events than this number."""
MAX_DAYS_OF_BIRTHS = 100_000
"""Largest number of days in which items are born, in a world that turns over."""
MAX_HALF_LIVES = 900
"""Largest number of half-lives between the first birth and the last one. All weights then fit into float64."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """The parameters of one synthetic world. Two worlds with equal configs are equal in every byte."""

    seed: int = 1
    """Seed of every random draw."""
    num_users: int = 3000
    """Number of users. Their ids are 1 to num_users."""
    num_items: int = 2000
    """Number of items. Their ids are successive integers from 100000 on."""
    num_topics: int = 20
    """Number of topics, which are arranged on a ring. Every item belongs to one topic."""
    num_styles: int = 4
    """Number of styles. Every item has one style, and every user has an affinity to each style."""

    start_ms: int = 1_736_121_600_000
    """Start of the world's period, ms UTC."""
    period_days: float = 60.0
    """Length of the period in days. Users arrive in the first 60% of the period. Items are born in the first 90%."""

    zipf_exponent: float = 1.0
    """The base weight of the item of rank r (from 0) is (r + zipf_offset) ** -zipf_exponent."""
    zipf_offset: float = 20.0
    """A larger offset makes the most popular items less dominant (see zipf_exponent)."""
    topic_exponent: float = 0.4
    """An interest falls on the topic of rank r (from 0) with probability proportional to (r + 1) ** -topic_exponent."""
    born_later_share: float = 0.25
    """Chance that an item is born during the period. Other items, and each topic's top item, exist from the start."""
    item_half_life_hours: float = 0.0
    """Half-life of an item's weight after its birth, in hours. 0 means that weights do not change.

    If this is not 0, the catalogue turns over. Items are born at a constant rate until users stop arriving, at 60% of
    the period, and later events are left out. The items that exist from the start were born before the start, at the
    same rate. The links of an item lead to items that were born shortly before it.
    """
    link_weights: tuple[float, ...] = (0.5, 0.3, 0.2)
    """Probability of each successor of an item, if a user follows a link from the item. They sum to 1."""

    slot_weights: tuple[float, ...] = (0.5, 0.25, 0.15, 0.1)
    """Weight of each of a user's interests, which are called slots. The weights sum to 1."""
    style_spread: float = 1.2
    """A user's affinity to a style is exp(style_spread × standard normal)."""
    drift_probability: float = 0.1
    """Chance that one slot drifts at a session start. To drift means that the topic of the slot is drawn again."""
    drift_near_share: float = 0.8
    """Share of drifts that go to a neighbouring topic on the ring. Other drifts go to any topic, even the old one."""

    median_events: float = 38.0
    """Median number of events of a user. The number is lognormal and then clipped to [min_events, max_events]."""
    events_spread: float = 0.75
    """Standard deviation of the logarithm of a user's number of events, before clipping."""
    min_events: int = 5
    """Smallest number of events of a user."""
    max_events: int = 200
    """Largest number of events of a user."""
    mean_session_events: float = 7.0
    """Mean number of events of a session. The number has a geometric distribution."""
    gap_seconds: float = 60.0
    """Median gap inside a session, in seconds. Gaps are lognormal, and are clipped to between 1 s and 25 min."""
    gap_spread: float = 1.0
    """Standard deviation of the logarithm of the gap inside a session."""

    repeat_probability: float = 0.07
    """Chance that an event repeats one of the user's recent items, if at least one recent event was not a hide."""
    link_probability: float = 0.45
    """Chance that an event follows a link. This is possible only inside a session, not after a hide, and only if the
    link leads to an item that is already born."""
    explore_probability: float = 0.12
    """Chance that an event explores. To explore means to draw the item from all topics, by popularity.

    If an event does not repeat, follow a link or explore, its item is drawn from the session's topic.
    """
    repeat_window: int = 20
    """Largest age, in events, of an event that a repeat can pick. The previous event has age 1."""
    repeat_decay: float = 0.9
    """A repeat picks the event of age a with weight repeat_decay ** a, or with weight 0 if the event was a hide."""
    switch_probability: float = 0.25
    """Chance, before each event inside a session, that the session's topic is drawn again from the user's interests."""
    switch_after_hide_probability: float = 0.6
    """Replaces switch_probability if the previous event was a hide."""

    engaged_actions: tuple[float, ...] = (0.77, 0.14, 0.07, 0.02)
    """Shares of the actions click, save, share and hide on items that were not explored. They sum to 1."""
    explored_actions: tuple[float, ...] = (0.62, 0.05, 0.03, 0.3)
    """Shares of the actions click, save, share and hide on explored items. They sum to 1."""
    repeat_surfaces: tuple[float, ...] = (0.5, 0.1, 0.4)
    """Shares of the surfaces home, related and search for repeats. They sum to 1."""
    link_surfaces: tuple[float, ...] = (0.05, 0.9, 0.05)
    """Shares of the same surfaces for followed links. They sum to 1."""
    topic_surfaces: tuple[float, ...] = (0.6, 0.1, 0.3)
    """Shares of the same surfaces for draws from the session's topic. They sum to 1."""
    explore_surfaces: tuple[float, ...] = (0.9, 0.05, 0.05)
    """Shares of the same surfaces for explored items. They sum to 1."""

    num_candidates: int = 6
    """Number of items drawn per request, including the event's own item. An item that is drawn twice is shown once."""
    late_share: float = 0.01
    """Share of events that the log receives late, by six hours on average. Others are received within seconds."""

    def __post_init__(self) -> None:
        for name in ("num_users", "num_topics", "num_styles", "min_events", "num_candidates", "repeat_window"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        check(self.num_items >= 4 * self.num_topics, "num_items", self.num_items, "at least 4 × num_topics")
        check(self.num_topics >= 3, "num_topics", self.num_topics, "3 or more, since topics have two neighbours")
        fits = self.min_events <= self.max_events < REQUESTS_PER_USER
        check(fits, "max_events", self.max_events, f"min_events to {REQUESTS_PER_USER - 1}")
        for name in ("period_days", "median_events", "gap_seconds", "zipf_offset", "repeat_decay"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        check(self.mean_session_events >= 1, "mean_session_events", self.mean_session_events, "1 or more")
        for name in (field for field in self.__annotations__ if field.endswith(("_probability", "_share"))):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        mechanisms = self.repeat_probability + self.link_probability + self.explore_probability
        check(mechanisms <= 1, "repeat + link + explore probability", mechanisms, "a sum of at most 1")
        lengths = {"_actions": len(ACTIONS), "_surfaces": len(SURFACES)}
        for name in (field for field in self.__annotations__ if field.endswith(("_actions", "_surfaces", "_weights"))):
            shares = getattr(self, name)
            length = next((n for suffix, n in lengths.items() if name.endswith(suffix)), len(shares))
            good = len(shares) == length and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9
            check(good, name, shares, f"{length} shares that sum to 1")
        if self.item_half_life_hours:
            share = self.days_of_arrivals / MAX_DAYS_OF_BIRTHS
            allowed = f"at least {share:.3g} if item_half_life_hours is set"
            check(self.born_later_share >= share, "born_later_share", self.born_later_share, allowed)
            least = self.days_of_births * 24.0 / MAX_HALF_LIVES
            allowed = f"0, or at least {least:.3g}: births may not span more than {MAX_HALF_LIVES} half-lives"
            check(self.item_half_life_hours >= least, "item_half_life_hours", self.item_half_life_hours, allowed)

    @property
    def turns_over(self) -> bool:
        """Whether items lose their appeal with age (see item_half_life_hours)."""
        return self.item_half_life_hours > 0

    @property
    def days_of_arrivals(self) -> float:
        """Number of days, from the start on, in which users arrive. If the catalogue turns over, the log ends then."""
        return 0.6 * self.period_days

    @property
    def days_of_births(self) -> float:
        """Number of days in which items are born if the catalogue turns over. They end with the arrivals."""
        return self.days_of_arrivals / self.born_later_share


def load_world_config(name_or_path: str) -> WorldConfig:
    """Reads the config of a world: a shipped world (`demo`) or a JSON file. An unknown name or setting
    raises UsageError.
    """
    if name_or_path.endswith(".json"):
        path = Path(name_or_path)
        if not path.is_file():
            raise UsageError(
                f"world file {path} does not exist",
                fix="give the path of a world's JSON file, or the name of a shipped world",
            )
        return from_dict(WorldConfig, read_json(path))
    shipped = shipped_worlds()
    if name_or_path not in shipped:
        raise UsageError(
            f"there is no world named {name_or_path!r}",
            allowed=f"allowed: {', '.join(shipped)}, or a path that ends in .json",
            fix=did_you_mean(name_or_path, shipped),
        )
    return from_dict(WorldConfig, json.loads(world_bytes(name_or_path)))


def shipped_worlds() -> list[str]:
    """Returns the names of the worlds that come with the package."""
    folder = importlib.resources.files("tackboard.events.synthetic") / "worlds"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def world_bytes(name: str) -> bytes:
    """Returns the content of a shipped world's file."""
    return (importlib.resources.files("tackboard.events.synthetic") / "worlds" / f"{name}.json").read_bytes()
