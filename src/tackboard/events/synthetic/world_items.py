"""This module makes the items of a synthetic world, and draws among the items that are alive (born) at a given time.

The world config decides each item's topic, style, weight, birth and successors. Items are drawn by inverse CDF.
Decided: the items of the same topic and style, called a cell, lie together, sorted by birth, and one array holds the
cumulative weights. So the items of a cell that are alive at a given time are a prefix of the cell. A draw among them is
one binary search, which is exact and needs no rejection.
Decided: if the catalogue turns over, the weight of every item is halved every `item_half_life_hours` after its birth.
At time t it is weight × 2^((birth - t) / half-life). The factor 2^(-t / half-life) is the same for all items, so it
cancels in every draw. What is left, weight × 2^(birth / half-life), does not change and takes the weight's place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.keyed_random import normal, permutation, uniform
from tackboard.events.synthetic.world_config import FIRST_ITEM_ID, WorldConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
_BIRTH_BITS = 44
"""Number of bits of a key that hold a birth, in ms after the start. Higher bits hold the cell. All births and times lie
within 550 years."""
_STREAM_RANK, _STREAM_STYLE, _STREAM_BORN_LATER, _STREAM_BIRTH, _STREAM_LINK, _STREAM_CONTENT = range(6)
CONTENT_WIDTH = 16
"""Width of the content vector of an item."""
_STYLE_SHARE, _NOISE_SHARE = 0.5, 0.5
"""Sizes of the style and of the noise in a content vector. The topic has size 1."""


class WorldItems:
    """Holds arrays with one value per item, from item 0 to num_items - 1. Times are ms after the world's start."""

    def __init__(self, config: WorldConfig) -> None:
        self.num_topics, self.num_styles = config.num_topics, config.num_styles
        items = np.arange(config.num_items, dtype=np.int64)
        rank = np.empty_like(items)
        rank[permutation(config.num_items, config.seed, _STREAM_RANK)] = items
        self.ids: Ints = FIRST_ITEM_ID + items
        # Successive ranks go to successive topics, so that every topic has its share of popular and of rare items.
        self.topic: Ints = rank % config.num_topics
        self.style = _floor(uniform(config.seed, _STREAM_STYLE, items) * config.num_styles)
        self.weight: Floats = np.asarray((rank + config.zipf_offset) ** -config.zipf_exponent, dtype=np.float64)
        later = uniform(config.seed, _STREAM_BORN_LATER, items) < config.born_later_share
        # The most popular item of every topic exists from the start, so a topic is never empty.
        later &= rank >= config.num_topics
        draws = uniform(config.seed, _STREAM_BIRTH, items)
        self.birth: Ints = np.where(later, _floor(draws * 0.9 * config.period_days * DAY_MS), 0)
        if config.turns_over:
            days = np.where(later, config.days_of_arrivals, config.days_of_arrivals - config.days_of_births)
            self.birth = _floor(draws * days * DAY_MS)
            self.weight *= np.exp2(self.birth / (config.item_half_life_hours * HOUR_MS))
        self.successors = self._link(config, rank)
        self._sort_cells(config)
        self._birth_order = np.argsort(self.birth, kind="stable")
        self._births_sorted = self.birth[self._birth_order]
        self._birth_cumulative = np.concatenate([[0.0], np.cumsum(self.weight[self._birth_order])])

    def _sort_cells(self, config: WorldConfig) -> None:
        """Sorts the items by (cell, birth). Each cell begins with a place of weight 0 that holds no item."""
        cell = self.topic * self.num_styles + self.style
        cells = np.arange(self.num_topics * self.num_styles)
        order = np.lexsort((self.birth, cell))
        first = np.searchsorted(cell[order], cells)
        self._cell_start = first + cells
        self._cell_order = np.insert(order, first, -1)
        keys = (cell << _BIRTH_BITS) + self.birth
        self._cell_keys = np.insert(keys[order], first, (cells << _BIRTH_BITS) + self.birth.min())
        weights = np.insert(self.weight[order], first, 0.0)
        # Weights that differ by many powers of 2 must not be added to the sum of another cell: they would be rounded
        # away. In a world without turnover the sum runs on through all cells, so that its events stay as they were.
        parts = np.split(weights, self._cell_start[1:]) if config.turns_over else [weights]
        self._cell_cumulative = np.concatenate([np.cumsum(part) for part in parts])
        # NumPy sorts complex numbers by the real part and then by the imaginary part.
        self._cell_search = (
            np.repeat(cells, np.diff(self._cell_start, append=len(weights))) + 1j * self._cell_cumulative
        )

    def _link(self, config: WorldConfig, rank: Ints) -> Ints:
        """Returns successors [num_items, links]: distinct items of the same topic, none of them the item itself.

        If the catalogue turns over, the successors of an item were born before it, at most about a half-life earlier.
        """
        items = np.arange(config.num_items, dtype=np.int64)
        in_topic = np.lexsort((-self.birth if config.turns_over else rank, self.topic))
        first = np.searchsorted(self.topic[in_topic], np.arange(config.num_topics))[self.topic]
        topic_size = (config.num_items - self.topic + config.num_topics - 1) // config.num_topics
        num_links = min(len(config.link_weights), int(topic_size.min()) - 1)
        place = np.empty_like(items)
        place[in_topic] = items
        place -= first
        reach = topic_size - num_links
        if config.turns_over:
            born_per_half_life = topic_size * config.item_half_life_hours / (24.0 * config.days_of_births)
            reach = np.clip(_floor(born_per_half_life), 1, reach)
        # The items of a topic form a circle, and a link is a number of steps on it. The steps of an item must be
        # distinct and positive, so each sorted draw is increased by its index plus 1.
        draws = uniform(config.seed, _STREAM_LINK, items[:, None], np.arange(num_links))
        steps = np.sort(_floor(draws * reach[:, None]), axis=1) + np.arange(num_links) + 1
        # After the sort, the strongest link would always lead to the nearest item. So the links are rotated at random.
        turn = _floor(uniform(config.seed, _STREAM_LINK, items, num_links) * num_links)
        steps = np.take_along_axis(steps, (np.arange(num_links) + turn[:, None]) % num_links, axis=1)
        target = (place[:, None] + steps) % topic_size[:, None]
        return np.asarray(in_topic[first[:, None] + target], dtype=np.int64)

    def content(self, config: WorldConfig) -> NDArray[np.float32]:
        """Returns noisy vectors [num_items, CONTENT_WIDTH] of length 1, as an encoder of texts or images would give.

        A vector is the sum of a random vector of the topic, one of the style and one of the item. The vectors depend
        only on the seed, and no event depends on them.
        """
        kinds = ((self.topic, 1.0), (self.style, _STYLE_SHARE), (np.arange(len(self.ids)), _NOISE_SHARE))
        place = np.arange(CONTENT_WIDTH)
        total = np.zeros((len(self.ids), CONTENT_WIDTH))
        for kind, (member, size) in enumerate(kinds):
            total += size * normal(config.seed, _STREAM_CONTENT, kind, member[:, None], place)
        return np.asarray(total / np.linalg.norm(total, axis=1, keepdims=True), dtype=np.float32)

    def draw_from_topic(self, topic: Ints, affinity: Floats, time: Ints, draws: Floats) -> Ints:
        """Draws one alive item of `topic` [M] per row with P ∝ weight × affinity[style]. `draws` is uniform [M, 2]."""
        cells = topic[:, None] * self.num_styles + np.arange(self.num_styles)
        start = self._cell_start[cells]
        last = np.searchsorted(self._cell_keys, (cells << _BIRTH_BITS) + time[:, None], side="right") - 1
        base = self._cell_cumulative[start]
        alive = self._cell_cumulative[last] - base
        style = pick(affinity * alive, draws[:, 0])[:, None]
        cell, start, last, base, alive = (
            np.take_along_axis(a, style, axis=1)[:, 0] for a in (cells, start, last, base, alive)
        )
        place = np.searchsorted(self._cell_search, cell + 1j * (base + draws[:, 1] * alive), side="right")
        return np.asarray(self._cell_order[np.clip(place, start + 1, last)], dtype=np.int64)

    def draw_popular(self, time: Ints, draws: Floats) -> Ints:
        """Draws one alive item of any topic per row with P ∝ weight."""
        end = np.searchsorted(self._births_sorted, time, side="right")
        place = np.searchsorted(self._birth_cumulative, draws * self._birth_cumulative[end], side="right") - 1
        return np.asarray(self._birth_order[np.clip(place, 0, end - 1)], dtype=np.int64)


def pick(weights: Floats, draws: Floats) -> Ints:
    """Draws one column per row of `weights` [M, K] by inverse CDF. Every row must have a positive sum."""
    cumulative = np.cumsum(weights, axis=1)
    column = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(axis=1)
    # A draw can round up to the row's sum. The draw then picks the last column with a positive weight.
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(column, last), dtype=np.int64)


def _floor(values: NDArray[Any]) -> Ints:
    return np.asarray(np.floor(values), dtype=np.int64)
