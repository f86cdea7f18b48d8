"""Hashes ids to rows of embedding tables. This NumPy version is the reference for all other versions of the hash.

An id is an int64; BLAKE2b turns a string into an int64. A row is computed in two steps, which int64 arithmetic can
repeat exactly on any device: mix the id with a seeded bijection of 64 bits (the finaliser of SplitMix64), then map the
upper 32 bits onto [0, rows) by multiply-and-shift. Decided: multiply-and-shift instead of modulo, because torch has no
unsigned 64-bit division. Multiply-and-shift needs rows < 2^31. The largest published table has only 160 million rows.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1
MAX_ROWS = (1 << 31) - 1
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MULTIPLIERS = (np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2))


def mix64(values: NDArray[Any] | int, seed: int) -> NDArray[np.uint64]:
    """Applies a bijection of 64-bit integers, chosen by `seed`. Adjacent inputs give unrelated outputs."""
    if isinstance(values, int):
        values = np.array([values & MASK_64], dtype=np.uint64)
    x = np.atleast_1d(values)
    if x.dtype != np.uint64:
        x = x.astype(np.int64, copy=False).view(np.uint64)
    if x.size == 1:
        # A request has only one user id. For one id, plain ints are several times faster than arrays.
        return np.array(_mixed_one(int(x.flat[0]), seed_offset(seed)), dtype=np.uint64).reshape(x.shape)
    # Many ids are mixed in place. A request has about 1,000 ids; new arrays for them would take as long as the mixing.
    x = x + np.uint64(seed_offset(seed))
    mixed: NDArray[np.uint64] = x >> _SHIFTS[0]
    mixed ^= x
    mixed *= _MULTIPLIERS[0]
    np.right_shift(mixed, _SHIFTS[1], out=x)
    x ^= mixed
    x *= _MULTIPLIERS[1]
    np.right_shift(x, _SHIFTS[2], out=mixed)
    mixed ^= x
    return mixed


@functools.lru_cache(maxsize=1024)
def seed_offset(seed: int) -> int:
    """Returns the number that `mix64` adds before mixing. Seeds 0, 1, 2 give unrelated numbers."""
    return _mixed_one(seed * GOLDEN_GAMMA, GOLDEN_GAMMA)


def _mixed_one(value: int, offset: int) -> int:
    x = (value + offset) & MASK_64
    x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK_64
    x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK_64
    return x ^ (x >> 31)


def table_seed(seed: int, table: int) -> int:
    """Returns the seed of hash function number `table` of a model whose seed is `seed`."""
    return (seed << 16) + table + 1


def row_ids(ids: NDArray[np.int64], num_hashes: int, num_rows: int, seed: int) -> NDArray[np.int64]:
    """Returns the row of each of `ids` [M] in each of `num_hashes` tables: int64 [M, num_hashes] in [0, num_rows)."""
    if not 0 < num_rows <= MAX_ROWS:
        raise DataError(f"a table cannot have {num_rows} rows", allowed=f"allowed: 1 to {MAX_ROWS}")
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    rows = np.empty((len(ids), num_hashes), dtype=np.int64)
    for table in range(num_hashes):
        upper = mix64(ids, table_seed(seed, table)) >> np.uint64(32)
        rows[:, table] = ((upper * np.uint64(num_rows)) >> np.uint64(32)).astype(np.int64)
    return rows


def string_id(text: str) -> int:
    """Hashes a string to an int64: the 8-byte BLAKE2b digest of its UTF-8 bytes, as a signed little-endian number."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.lru_cache(maxsize=1 << 16)
def remembered_string_id(text: str) -> int:
    """Returns `string_id(text)` from a cache. Meant for texts that repeat: categories, countries, devices."""
    return string_id(text)
