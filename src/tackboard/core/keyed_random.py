"""Random numbers that are functions of their key, never of a stream.

Whatever a resumed run must repeat (order, negatives, synthetic worlds) is drawn as f(seed, keys…): the same key gives
the same number in any process, in any order, forever. No library's random stream is involved, so no library's update
can change a dataset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.hashing import mix64

Key = int | NDArray[Any]


def bits(seed: int, *keys: Key) -> NDArray[np.uint64]:
    """64 random bits for each element of the broadcast `keys`."""
    state = mix64(seed, 0)
    for depth, key in enumerate(keys):
        lane = mix64(np.asarray(key, dtype=np.int64), depth + 1).reshape(np.shape(key))
        state = mix64(state + lane, depth + 1)
    return state


def uniform(seed: int, *keys: Key) -> NDArray[np.float64]:
    """Uniform float64 in [0, 1), 53 random bits each; shape of the broadcast keys (at least one-dimensional)."""
    return np.asarray((bits(seed, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normal(seed: int, *keys: Key) -> NDArray[np.float64]:
    """Standard normal float64 by Box–Muller over two keyed uniforms."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(seed, *keys, 0)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(seed, *keys, 1)))


def permutation(n: int, seed: int, *keys: int) -> NDArray[np.int64]:
    """A permutation of range(n), a pure function of (n, seed, keys)."""
    return np.argsort(bits(seed, *keys, np.arange(n, dtype=np.int64)), kind="stable").astype(np.int64)
