"""This module lists the features that every rival of `tackboard bench features` computes, and holds shared functions.

It holds the names and types of the features, the limits of buckets, and functions for ids and vectors. Each rival
computes the features in its own way. A rival's answer is a pair: the features of the requests by name, and the features
of the candidates by name.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.bench.features.data import DAY_MS
from tackboard.core.hashing import mix64, row_ids, string_id

INT, FLOAT, BOOL, INTS = pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.int64())
REQUEST_FEATURES = {
    "events_7d": INT, "saves": INT, "last_click": INT, "categories": INT, "dwell_7d": INT, "decayed_dwell": FLOAT,
    "top_items": INTS, "save_rate": FLOAT, "is_weekend": BOOL, "country_id": INT, "device_x_hour": INT,
    "device_index": INT, "age_bucket": INT, "hour": INT, "weekday": INT, "user_age_days": FLOAT, "num_top": INT,
    "favourite": INT,
}  # fmt: skip
ITEM_FEATURES = {
    "ctr": FLOAT, "discount": FLOAT, "price_missing": BOOL, "rating": FLOAT, "category_id": INT, "log_price": FLOAT,
    "price_z": FLOAT, "price_bucket": INT, "log_views": FLOAT, "ctr_log_odds": FLOAT, "embedding_norm": FLOAT,
    "brand_id": INT, "is_sale": BOOL,
}  # fmt: skip
"""Features that depend on the item alone. A rival that may prepare data computes them before the clock starts."""
PAIR_FEATURES = {
    "same_category": INT, "is_new": BOOL, "affordable": BOOL, "item_bucket": INT, "country_x_category": INT,
    "item_age_bucket": INT, "taste_match": FLOAT, "item_age_days": FLOAT, "in_top": BOOL,
}  # fmt: skip
"""Features that depend on both the request and the item."""
ROW_FEATURES = ITEM_FEATURES | PAIR_FEATURES

AGE_LIMITS = (18, 25, 35, 45, 55, 65)
PRICE_LIMITS = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
ITEM_AGE_LIMITS = (0.0, 1.0, 7.0, 30.0, 90.0, 365.0)
DEVICES = {"phone": 1, "tablet": 2, "desktop": 3}
WEEK_MS = 7 * DAY_MS
DECAY = -math.log(2.0) / (3 * DAY_MS)


def to_arrow(answer: tuple[Any, Any]) -> tuple[pa.Table, pa.Table]:
    """Returns a rival's answer as Arrow tables for the comparison. Features of a single request may be plain values.

    This call is not timed.
    """
    requests, rows = answer
    if isinstance(requests, Mapping) and isinstance(requests["hour"], int):
        requests = {name: [value] for name, value in requests.items()}
    # Only features that may be missing get their type here. The comparison also checks the types of all other features.
    types = {name: REQUEST_FEATURES[name] for name in ("last_click", "favourite", "top_items")}
    return (
        pa.table({name: pa.array(requests[name], type=types.get(name)) for name in REQUEST_FEATURES}),
        pa.table({name: pa.array(rows[name]) for name in ROW_FEATURES}),
    )


@functools.cache
def known_string_id(text: str) -> int:
    """Returns the id of a string. Rivals cache the ids from one request to the next."""
    return string_id(text)


@functools.cache
def known_brand_id(text: str) -> int:
    """Returns the id of a brand. All spellings of a brand have the same id."""
    return string_id(unicodedata.normalize("NFC", text.strip().lower()))


@functools.cache
def known_sale(text: str) -> bool:
    """Returns whether a title contains "sale"."""
    return "sale" in text.lower()


def cross_ids(one: Any, other: Any) -> NDArray[np.int64]:
    """Returns an id for each pair of ids of two columns. Either column may be a single id."""
    mixed = mix64(np.atleast_1d(np.asarray(one, dtype=np.int64)), 0)
    other = np.atleast_1d(np.asarray(other, dtype=np.int64)).view(np.uint64)
    return mix64(mixed ^ other, 0).view(np.int64)


def item_buckets(ids: Any) -> NDArray[np.int64]:
    """Returns the bucket of each id, out of 100,000 buckets."""
    return row_ids(np.asarray(ids, dtype=np.int64), 1, 100_000, 0)[:, 0]


def squares(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the squared length of each vector [n, width], in 64 bits."""
    return dots(vectors, vectors)


def dots(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the scalar products of vectors [n, width] in 64 bits. `left` may be one vector [1, width]."""
    wide, other = left.astype(np.float64), right.astype(np.float64)
    return other @ wide[0] if len(wide) == 1 else np.einsum("ij,ij->i", wide, other)


def cosines(product: Any, left_square: Any, right_square: Any) -> NDArray[np.float64]:
    """Returns cosines from scalar products and squared lengths. The cosine of a zero vector is 0."""
    length = np.sqrt(left_square * right_square)
    return np.divide(product, length, out=np.zeros_like(product), where=length > 0)
