"""Computes random numbers as functions of a key, without the state of a random stream.

Everything that a resumed run must repeat (the order of the data, negatives, synthetic worlds) is drawn as
f(seed, keys…). The same key gives the same number in any process, in any order, for ever. No library's random stream is
used, so an update of a library cannot change a dataset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.hashing import mix64

Key = int | NDArray[Any]


def bits(seed: int, *keys: Key) -> NDArray[np.uint64]:
    """Returns 64 random bits for each element of the broadcast `keys`."""
    state = mix64(seed, 0)
    for depth, key in enumerate(keys):
        lane = mix64(np.asarray(key, dtype=np.int64), depth + 1).reshape(np.shape(key))
        state = mix64(state + lane, depth + 1)
    return state


def uniform(seed: int, *keys: Key) -> NDArray[np.float64]:
    """Returns uniform float64 in [0, 1) with 53 random bits, in the shape of the broadcast keys (at least 1-D)."""
    return np.asarray((bits(seed, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normal(seed: int, *keys: Key) -> NDArray[np.float64]:
    """Returns standard normal float64, by Box–Muller over two keyed uniforms."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(seed, *keys, 0)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(seed, *keys, 1)))


def permutation(n: int, seed: int, *keys: int) -> NDArray[np.int64]:
    """Returns a permutation of range(n), which depends only on (n, seed, keys)."""
    return np.argsort(bits(seed, *keys, np.arange(n, dtype=np.int64)), kind="stable").astype(np.int64)
