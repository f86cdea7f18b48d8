"""Groups candidates by the age of their item: the time of the request minus the time of the item.

The time of an item is an attribute in items.parquet, such as the time of its birth. `first_ms`, the time of the item's
first event in the log, is in every dataset and may be used instead. An item whose time is after the request counts
as `under 7 days` old.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tackboard.core.config import did_you_mean
from tackboard.core.errors import ConfigError
from tackboard.events.dataset import ITEMS, Dataset
from tackboard.events.schema import numpy_column
from tackboard.features.arrow import from_arrow
from tackboard.features.entity_tables import find_ids
from tackboard.features.types import TIME

DAY_MS = 86_400_000
BOUNDS_DAYS = (7, 28)
AGES = ("under 7 days", "7 to 28 days", "28 days or more", "unknown")
"""Names of the slices. The last slice holds items without a time."""


def age_slices(
    dataset: Dataset, item_time: str, item_ids: NDArray[np.int64], request_ms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the position in `AGES` of each candidate [E]. `item_time` names a time attribute of items.parquet."""
    table = dataset.read_items()
    if item_time not in table.column_names:
        names = [name for name in table.column_names if name not in ("item", "item_id", "num_events")]
        raise ConfigError(
            f"evaluation.item_time = {item_time!r} is not in {dataset.path / ITEMS}",
            allowed=f"allowed: a column of times: {', '.join(names)}",
            fix=did_you_mean(item_time, names) or "choose another: --item-time NAME, or none: --item-time ''",
        )
    times = from_arrow(table[item_time], TIME, f"evaluation.item_time: the column {item_time} of the items")
    places = find_ids(numpy_column(table, "item_id"), item_ids)
    is_known = places >= 0
    places = np.where(is_known, places, 0)
    if times.present is not None:
        is_known &= times.present[places]
    ages_days = (request_ms - times.values[places]) / DAY_MS
    return np.where(is_known, np.searchsorted(BOUNDS_DAYS, ages_days, side="right"), len(BOUNDS_DAYS) + 1)
