"""This module makes the items of a synthetic world, and draws among the items that are alive (born) at a given time.

The world config decides each item's topic, style, weight, birth and successors. Items are drawn by inverse CDF.
Decided: the items of the same topic and style, called a cell, lie together, sorted by birth, and one array holds the
cumulative weights. So the items of a cell that are alive at a given time are a prefix of the cell. A draw among them is
one binary search, which is exact and needs no rejection.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.keyed_random import normal, permutation, uniform
from tackboard.events.synthetic.world_config import FIRST_ITEM_ID, WorldConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DAY_MS = 86_400_000
_BIRTH_BITS = 44
"""Number of bits of a key that hold a birth, in ms after the start (up to 550 years). Higher bits hold the cell."""
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
        birth = _floor(uniform(config.seed, _STREAM_BIRTH, items) * 0.9 * config.period_days * DAY_MS)
        self.birth: Ints = np.where(later, birth, 0)
        self.successors = self._link(config, rank)
        cell = self.topic * self.num_styles + self.style
        self._cell_order = np.lexsort((self.birth, cell))
        self._cell_keys = (cell << _BIRTH_BITS | self.birth)[self._cell_order]
        self._cell_cumulative = np.concatenate([[0.0], np.cumsum(self.weight[self._cell_order])])
        cells = np.arange(self.num_topics * self.num_styles)
        self._cell_start = np.searchsorted(cell[self._cell_order], cells)
        self._birth_order = np.argsort(self.birth, kind="stable")
        self._births_sorted = self.birth[self._birth_order]
        self._birth_cumulative = np.concatenate([[0.0], np.cumsum(self.weight[self._birth_order])])

    def _link(self, config: WorldConfig, rank: Ints) -> Ints:
        """Returns successors [num_items, links]: distinct items of the same topic, none of them the item itself."""
        by_rank = np.argsort(rank)
        items = np.arange(config.num_items, dtype=np.int64)
        topic_size = (config.num_items - self.topic + config.num_topics - 1) // config.num_topics
        num_links = min(len(config.link_weights), int(topic_size.min()) - 1)
        place = rank // config.num_topics
        # The items of a topic form a circle, and a link is a number of steps on it. The steps of an item must be
        # distinct and positive, so each sorted draw is increased by its index plus 1.
        draws = uniform(config.seed, _STREAM_LINK, items[:, None], np.arange(num_links))
        steps = np.sort(_floor(draws * (topic_size[:, None] - num_links)), axis=1) + np.arange(num_links) + 1
        # After the sort, the strongest link would always lead to the nearest item. So the links are rotated at random.
        turn = _floor(uniform(config.seed, _STREAM_LINK, items, num_links) * num_links)
        steps = np.take_along_axis(steps, (np.arange(num_links) + turn[:, None]) % num_links, axis=1)
        target = (place[:, None] + steps) % topic_size[:, None]
        return np.asarray(by_rank[target * config.num_topics + self.topic[:, None]], dtype=np.int64)

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
        end = np.searchsorted(self._cell_keys, cells << _BIRTH_BITS | time[:, None], side="right")
        base = self._cell_cumulative[start]
        alive = self._cell_cumulative[end] - base
        style = pick(affinity * alive, draws[:, 0])[:, None]
        start, end, base, alive = (np.take_along_axis(a, style, axis=1)[:, 0] for a in (start, end, base, alive))
        place = np.searchsorted(self._cell_cumulative, base + draws[:, 1] * alive, side="right") - 1
        return np.asarray(self._cell_order[np.clip(place, start, end - 1)], dtype=np.int64)

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
