"""This module is the law of an endless stream of events: it draws the events and gives their exact probabilities.

The law returns the events of given users and the probabilities of given items. No table is stored: every event is a
function of (seed, user, position). So any part of the stream can be made alone, on any machine, for hundreds of
millions of items.

    topic of a user    stay with probability `stay`; move to the next on the ring with `advance`; else jump to any topic
    topic of an event  the user's topic; with probability `noise` a random topic (the user's own topic does not change)
    item of an event   number = rank × topics + topic, where the rank in the topic follows Zipf's law;
                       id = (a·number + b) modulo the number of items

Zipf's law here is the density (1 + x)^−exponent, cut into whole ranks: P(rank) is the integral from rank to rank + 1.
So a rank is drawn by inverting the integral, and its probability is a difference, both in closed form. All topics are
equally popular, so an item's share of all events is P(rank) / topics. Therefore the popularity over the whole catalogue
also follows Zipf's law, except that the items of the same rank, one per topic, are all equally popular.

An event's item reveals the event's topic, but not whether the event was noise. `next_topics` returns the exact
probability of the next event's topic given all earlier events, by the forward filter of this hidden Markov chain. No
model that reads the same events can predict better. Decided: the topics lie on a ring. So the topic after any number of
moves is the sum of the moves, and the topics of all events can be computed without a loop over positions.

Shapes: U users, N events end to end, T topics, M items.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.config import check
from tackboard.core.hashing import mix64

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
USER_STREAM, ID_STREAM, SAMPLE_STREAM = 61, 62, 63
"""Numbers of three random streams: for users' events, for the ids of items and for `sample_items`."""
LENGTH, MOVE, JUMP, IS_NOISE, NOISE, RANK = range(1, 7)
"""Numbers of the random draws of one event. Each draw uses its own bits."""
MAX_ITEMS = (1 << 31) - 1
"""The largest number of items: the product of two item numbers must fit into 63 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamLawConfig:
    """The settings of a stream made on the fly."""

    seed: int = 0
    """Seed of the stream: it decides every event and the ids of the items."""
    num_items: int = 200_000_000
    """Number of items; a multiple of num_topics. Their ids are 0 to num_items - 1."""
    num_topics: int = 100
    """Number of topics, all equally large and equally popular."""
    zipf_exponent: float = 1.2
    """Exponent of the popularity of items inside a topic."""
    stay: float = 0.85
    """Probability that a user stays with the topic of the previous event."""
    advance: float = 0.1
    """Probability that a user moves to the next topic. A user who neither stays nor moves to the next topic
    jumps to any topic."""
    noise: float = 0.1
    """Probability that the topic of an event is drawn from all topics and need not be the user's topic."""
    mean_events: float = 48.0
    """Mean number of events of a user. The numbers follow a geometric distribution, cut off at max_events."""
    max_events: int = 256
    """Largest number of events of a user."""
    num_users: int = 100_000_000
    """Number of users for training and validation. Their ids are 0 to num_users - 1."""
    num_test_users: int = 8192
    """Number of users for evaluation, who are never trained on. Their ids follow those of the other users."""

    def __post_init__(self) -> None:
        check(-(1 << 63) <= self.seed < 1 << 63, "data.law.seed", self.seed, "a whole number of 64 bits")
        check(self.num_topics >= 2, "data.law.num_topics", self.num_topics, "2 or more")
        fits = self.num_topics <= self.num_items <= MAX_ITEMS and self.num_items % self.num_topics == 0
        check(fits, "data.law.num_items", self.num_items, f"a multiple of num_topics, up to {MAX_ITEMS}")
        check(0.0 <= self.zipf_exponent <= 4.0, "data.law.zipf_exponent", self.zipf_exponent, "0 to 4")
        for name in ("stay", "advance", "noise"):
            check(0.0 <= getattr(self, name) <= 1.0, f"data.law.{name}", getattr(self, name), "0 to 1")
        check(self.stay + self.advance <= 1.0, "data.law.advance", self.advance, "at most 1 - data.law.stay")
        check(self.max_events >= 2, "data.law.max_events", self.max_events, "2 or more")
        is_mean = 1.0 < self.mean_events < self.max_events
        check(is_mean, "data.law.mean_events", self.mean_events, "above 1, below data.law.max_events")
        for name in ("num_users", "num_test_users"):
            check(1 <= getattr(self, name) < 1 << 60, f"data.law.{name}", getattr(self, name), "1 or more")


class StreamLaw:
    """Draws the events of users, and knows the exact probability of every item."""

    def __init__(self, config: StreamLawConfig) -> None:
        self.config = config
        self._num_ranks = config.num_items // config.num_topics
        multiplier = int(keyed_random.bits(config.seed, ID_STREAM, 0)[0]) % config.num_items
        while math.gcd(multiplier, config.num_items) != 1:
            multiplier = (multiplier + 1) % config.num_items
        self._multiplier, self._inverse = multiplier, pow(multiplier, -1, config.num_items)
        self._shift = int(keyed_random.bits(config.seed, ID_STREAM, 1)[0]) % config.num_items

    @functools.cached_property
    def _end_rate(self) -> float:
        """Probability that a user's history ends after an event, chosen so that the mean length is `mean_events`."""
        rate = 1.0 / self.config.mean_events
        for _ in range(200):
            rate = (1.0 - (1.0 - rate) ** self.config.max_events) / self.config.mean_events
        return rate

    def num_events(self, users: Ints) -> Ints:
        """Returns the number of events of each user [U]."""
        draw = _uniform(self._states(users), LENGTH)
        found = 1 + np.floor(np.log1p(-draw) / math.log1p(-self._end_rate))
        return np.asarray(np.minimum(found, self.config.max_events), dtype=np.int64)

    def items_of(self, users: Ints, offsets: Ints) -> Ints:
        """Returns the items of each user's first offsets[u + 1] - offsets[u] events, all users end to end [N].

        In the result, user u has the events offsets[u] to offsets[u + 1] - 1. Every user must have at least one event.
        """
        events_N = self._events(users, offsets)
        topics_N = self._topics(events_N, offsets)
        is_noise_N = _uniform(events_N, IS_NOISE) < self.config.noise
        topics_N[is_noise_N] = self._any_topic(events_N[is_noise_N], NOISE)
        return self._ids(self._ranks(_uniform(events_N, RANK)) * self.config.num_topics + topics_N)

    def topics_of(self, users: Ints, offsets: Ints) -> Ints:
        """Returns the user's own topic at each event of `items_of` [N]."""
        return self._topics(self._events(users, offsets), offsets)

    def topics_of_items(self, item_ids: Ints) -> Ints:
        """Returns the topic of each item."""
        return self._numbers(item_ids) % self.config.num_topics

    def log_share(self, item_ids: Ints) -> NDArray[np.float32]:
        """Returns the log of each item's share of all events."""
        return self.log_rank_share(item_ids).astype(np.float32) - np.float32(math.log(self.config.num_topics))

    def log_rank_share(self, item_ids: Ints) -> Floats:
        """Returns the log of each item's share of the events of its topic."""
        first = self._numbers(item_ids) // self.config.num_topics + 1.0
        power = 1.0 - self.config.zipf_exponent
        # This is the log of the integral from rank to rank + 1, without a difference of two nearly equal numbers.
        grown = np.log1p(1.0 / first)
        if power:
            grown = np.expm1(power * grown) / power
        return np.asarray(power * np.log(first) + np.log(grown) - math.log(self._total))

    def next_topics(self, item_ids: Ints, offsets: Ints) -> Floats:
        """Returns the probability that each user's next event has each topic, given all events of the user [U, T].

        User u has the events offsets[u] to offsets[u + 1] - 1; a user may have none.
        """
        config, topics_N = self.config, self.topics_of_items(item_ids)
        lengths = np.diff(offsets)
        belief_UT = np.full((len(lengths), config.num_topics), 1.0 / config.num_topics)
        order = np.argsort(-lengths, kind="stable")
        starts = offsets[:-1][order]
        jump = (1.0 - config.stay - config.advance) / config.num_topics
        for position in range(int(lengths.max(initial=0))):
            # The longest histories come first, so the users who have this event are the first rows.
            num_rows = int(np.searchsorted(-lengths[order], -position, side="left"))
            shown = topics_N[starts[:num_rows] + position]
            seen = belief_UT[:num_rows]
            rows = np.arange(num_rows)
            own = seen[rows, shown] * (1.0 - config.noise)
            seen *= config.noise / config.num_topics
            seen[rows, shown] += own
            seen /= seen.sum(axis=1, keepdims=True)
            belief_UT[:num_rows] = config.stay * seen + config.advance * np.roll(seen, 1, axis=1) + jump
        found = np.empty_like(belief_UT)
        found[order] = (1.0 - config.noise) * belief_UT + config.noise / config.num_topics
        return found

    def sample_items(self, count: int) -> Ints:
        """Returns `count` distinct items, sorted: the first `count` that appear in one long draw by popularity.

        The draw depends only on the seed. If `count` is at least the number of items, all items are returned.
        """
        if count >= self.config.num_items:
            return np.arange(self.config.num_items, dtype=np.int64)
        size = 2 * count
        while True:
            states = keyed_random.bits(self.config.seed, SAMPLE_STREAM, np.arange(size, dtype=np.int64))
            numbers = self._ranks(_uniform(states, RANK)) * self.config.num_topics + self._any_topic(states, JUMP)
            found, first = np.unique(numbers, return_index=True)
            if len(found) >= count:
                return np.sort(self._ids(found[np.argsort(first)[:count]]))
            size *= 2

    def _states(self, users: Ints) -> NDArray[np.uint64]:
        """Returns 64 bits of each user, from which the bits of the user's events are derived."""
        return keyed_random.bits(self.config.seed, USER_STREAM, users)

    def _events(self, users: Ints, offsets: Ints) -> NDArray[np.uint64]:
        """Returns 64 bits of each event [N]: the bits of its user plus the event's position."""
        lengths = np.diff(offsets)
        positions = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        return np.asarray(np.repeat(self._states(users), lengths) + positions.astype(np.uint64))

    def _topics(self, events_N: NDArray[np.uint64], offsets: Ints) -> Ints:
        config, move_N = self.config, _uniform(events_N, MOVE)
        is_jump_N = move_N >= config.stay + config.advance
        is_jump_N[offsets[:-1]] = True
        advances_N = np.cumsum((move_N >= config.stay) & ~is_jump_N)
        last_jump_N = np.maximum.accumulate(np.where(is_jump_N, np.arange(len(events_N)), 0))
        began_N = self._any_topic(events_N[last_jump_N], JUMP)
        return np.asarray((began_N + advances_N - advances_N[last_jump_N]) % config.num_topics)

    def _any_topic(self, events_N: NDArray[np.uint64], purpose: int) -> Ints:
        return (_uniform(events_N, purpose) * self.config.num_topics).astype(np.int64)

    @functools.cached_property
    def _total(self) -> float:
        """The integral of the density over all ranks."""
        power = 1.0 - self.config.zipf_exponent
        grown = math.log1p(self._num_ranks)
        return math.expm1(power * grown) / power if power else grown

    def _ranks(self, draw: Floats) -> Ints:
        """Returns the rank at which the integral of the density reaches the share `draw` of its total."""
        power = 1.0 - self.config.zipf_exponent
        reached = draw * self._total
        ranks = np.expm1(np.log1p(power * reached) / power) if power else np.expm1(reached)
        return np.minimum(ranks.astype(np.int64), self._num_ranks - 1)

    def _ids(self, numbers: Ints) -> Ints:
        return (numbers * self._multiplier + self._shift) % self.config.num_items

    def _numbers(self, item_ids: Ints) -> Ints:
        return (item_ids - self._shift) % self.config.num_items * self._inverse % self.config.num_items


def _uniform(states: NDArray[np.uint64], purpose: int) -> Floats:
    """Returns a random number in [0, 1) for each state. Each purpose gets its own numbers."""
    return np.asarray((mix64(states, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53)
