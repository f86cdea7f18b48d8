"""This module holds the code that the rivals in pandas, NumPy and Feast share.

It turns the tables of `tackboard.bench.features.data` into frames and arrays. In the frames and arrays of items,
position -1 is an unknown item. The module also computes the features of one request that need no frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from rivals.feature_list import AGE_LIMITS, DECAY, DEVICES, WEEK_MS, cross_ids, known_string_id
from tackboard.bench.features.data import WIDTH, World

Array = NDArray[Any]


def frame(table: pa.Table) -> pd.DataFrame:
    """Returns a table as a data frame, without its columns of vectors.

    A column of strings becomes categorical. A column of ints becomes floats if a value is missing.
    """
    names = [name for name in table.column_names if not pa.types.is_fixed_size_list(table[name].type)]
    return table.select(names).to_pandas()


def vectors(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """Returns vectors as an array [n + 1, width]. Missing vectors are zeros. The last row is an unknown item."""
    array = column.combine_chunks()
    values = array.values.to_numpy(zero_copy_only=False).reshape(-1, WIDTH).copy()
    values[array.is_null().to_numpy(zero_copy_only=False)] = 0.0
    return np.vstack([values, np.zeros((1, WIDTH), dtype=np.float32)])


class Frames:
    """The tables as frames, with separate arrays of vectors and with indexes of ids."""

    def __init__(self, world: World) -> None:
        self.events, self.users, self.requests = frame(world.events), frame(world.users), frame(world.requests)
        self.rows, items = frame(world.rows), frame(world.items)
        self.item_index, self.user_index = pd.Index(items["item_id"]), pd.Index(self.users["user_id"])
        # The last row is an unknown item, so position -1 gives missing values.
        self.items = items.reindex(range(len(items) + 1))
        self.taste, self.embedding = vectors(world.users["taste"]), vectors(world.items["embedding"])

    def single_requests(self) -> Iterator[tuple[dict[str, Any], pd.DataFrame, Array]]:
        """Yields each request with the attributes of its user, the user's events, and the ids of its candidates."""
        for number, asked in enumerate(self.requests.to_dict("records")):
            user = int(self.user_index.get_loc(asked["user_id"]))
            known = self.users.iloc[user].to_dict() | asked | {"taste": self.taste[user : user + 1]}
            history = self.events[self.events["user_id"] == asked["user_id"]].reset_index(drop=True)
            yield known, history, self.rows["item_id"][self.rows["request"] == number].to_numpy()


def request_values(
    *, request_ms: int, device: str, country: Any, age: Any, born: Any, saves: int, events_7d: int
) -> dict[str, Any]:
    """Computes the features of a request that do not read the events directly.

    A missing attribute of the user is None or NaN.
    """
    moment = pd.Timestamp(request_ms, unit="ms", tz="UTC")
    hour, weekday = moment.tz_convert("Europe/Berlin").hour, moment.tz_convert("America/New_York").weekday()
    index = DEVICES.get(device.lower(), 0)
    return {
        "save_rate": saves / events_7d if events_7d else 0.0,
        "is_weekend": weekday >= 5,
        "country_id": known_string_id(country if isinstance(country, str) else ""),
        "device_x_hour": int(cross_ids(index, hour)[0]),
        "device_index": index,
        "age_bucket": int(np.searchsorted(AGE_LIMITS, 0 if age is None or np.isnan(age) else age, side="right")),
        "hour": hour,
        "weekday": weekday,
        "user_age_days": 0.0 if born is None or np.isnan(born) else (request_ms - born) / 1000.0 / 86400.0,
    }


def event_values(age_ms: Array, is_click: Array, is_save: Array, item_ids: Array, dwell_ms: Array) -> dict[str, Any]:
    """Computes the aggregations of the events of one request in NumPy, except those of categories."""
    item, click_age, dwell = item_ids[is_click], age_ms[is_click], dwell_ms[is_click]
    distinct, last_place, times = np.unique(item[::-1], return_index=True, return_counts=True)
    top = distinct[np.lexsort((last_place, -times))[:5]]
    return {
        "events_7d": int(np.count_nonzero(age_ms < WEEK_MS)),
        "saves": int(np.count_nonzero(is_save)),
        "last_click": int(item[-1]) if len(item) else None,
        "dwell_7d": int(dwell[click_age < WEEK_MS].sum()),
        "decayed_dwell": float((dwell * np.exp(click_age * DECAY)).sum()),
        "top_items": top,
        "num_top": len(top),
        "favourite": int(top[0]) if len(top) else None,
    }
