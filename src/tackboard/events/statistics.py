"""This module computes counts and distributions of a dataset's events and items, as one JSON object.

`init` prints these statistics, and writes the actions and the numbers of events, users and items into the recipe.
docs/synthetic-world.md uses the statistics to compare worlds with real logs. All columns must fit into memory.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.events.schema import FIELD_KINDS, encode, field_names, id_type, numpy_column

SESSION_GAP_MS = 30 * 60 * 1000
"""If two successive events of a user lie further apart than this, a new session begins."""
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
FIELDS = {
    **dict.fromkeys(("num_events", "num_users", "num_items", "num_items_listed", "first_ms", "last_ms"), int),
    **dict.fromkeys(("user_type", "item_type"), Literal["int64", "string"]),
    **dict.fromkeys(("actions", "surfaces"), dict[str, float]),
}
"""The fields that statistics.json must have, and their types. All other fields may be missing."""
OPTIONAL_FIELDS = {"fields": dict[str, dict[str, Any]]}
HEAD_SHARE = 0.1
"""The Zipf exponent is fitted to the most popular items: this share of the items with events, at least two items."""


def describe(events: pa.Table, items: pa.Table) -> dict[str, Any]:
    """Returns the statistics. `events` comes from `complete_events`. Every share in the result lies in [0, 1]."""
    user_id, item_id = numpy_column(events, "user_id"), numpy_column(events, "item_id")
    time_ms = numpy_column(events, "time_ms")
    same_user = user_id[1:] == user_id[:-1]
    starts = np.append(0, np.flatnonzero(~same_user) + 1)
    per_user = np.diff(np.append(starts, len(user_id)))
    per_item = numpy_column(items, "num_events")
    per_item = np.sort(per_item[per_item > 0])[::-1]
    num_sessions = len(time_ms) - int((same_user & (np.diff(time_ms) <= SESSION_GAP_MS)).sum())
    repeats, immediate = count_repeats(per_user, item_id, same_user, numpy_column(items, "item_id"))
    return {
        "num_events": len(user_id),
        "num_users": len(per_user),
        "num_items": len(per_item),
        "num_items_listed": items.num_rows,
        "user_type": id_type(events.schema.field("user").type),
        "item_type": id_type(events.schema.field("item").type),
        "first_ms": int(time_ms.min()),
        "last_ms": int(time_ms.max()),
        "events_per_user": _spread(per_user),
        "events_per_item": _spread(per_item),
        "popularity": _popularity(per_item),
        "repeats": {"share": repeats / len(item_id), "immediate_share": immediate / len(item_id)},
        "actions": name_shares(events["action"]),
        "surfaces": name_shares(events["surface"]),
        "gaps_s": _spread(np.diff(time_ms)[same_user] / 1000.0, disposable=True),
        "sessions": {
            "count": num_sessions,
            "per_user": num_sessions / len(per_user),
            "events_per_session": len(time_ms) / num_sessions,
        },
        "item_births": _births(items, int(time_ms.min()), int(time_ms.max())),
        "fields": {
            name: {"type": FIELD_KINDS[events[name].type], "num_missing": events[name].null_count}
            for name in field_names(events)
        },
    }


def name_shares(column: pa.ChunkedArray) -> dict[str, float]:
    """Maps each name to its share of the events. The most frequent name comes first."""
    array = encode(column)
    counts = np.bincount(array.indices.to_numpy(), minlength=len(array.dictionary))
    pairs = zip(array.dictionary.to_pylist(), counts.tolist(), strict=True)
    pairs_sorted = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return {name: count / max(len(array), 1) for name, count in pairs_sorted if count}


def _spread(values: NDArray[Any], *, disposable: bool = False) -> dict[str, float]:
    """Returns mean and quantiles, or {} if there are no values. With `disposable`, reorders `values` to save a copy."""
    if not len(values):
        return {}
    mean = float(values.mean())
    quantiles = np.quantile(values, QUANTILES, overwrite_input=disposable)
    named = {f"q{round(100 * q):02d}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": mean, **named}


def _popularity(per_item: NDArray[np.int64]) -> dict[str, float]:
    """Measures how strongly the events concentrate on few items. `per_item` holds counts of events, largest first."""
    count, total = len(per_item), int(per_item.sum())
    rank = np.arange(count, 0, -1)
    gini = float((2 * rank - count - 1) @ np.sort(per_item)[::-1]) / (count * total)
    head = max(2, round(HEAD_SHARE * count))
    logs = np.log(np.arange(1, head + 1)), np.log(per_item[:head])
    slope = 0.0 if count < 2 else float(np.polyfit(logs[0][:count], logs[1], 1)[0])
    return {
        "top_1_percent_share": float(per_item[: max(1, count // 100)].sum() / total),
        "top_10_percent_share": float(per_item[: max(1, count // 10)].sum() / total),
        "gini": gini,
        "zipf_exponent_of_head": -slope,
    }


def count_repeats(
    per_user: NDArray[Any], item_id: NDArray[Any], same_user: NDArray[np.bool_], known_items: NDArray[Any]
) -> tuple[int, int]:
    """Counts two kinds of events: repeats of any earlier item of the same user, and repeats of the previous item.

    `per_user` holds the number of events of each user, and `same_user` says for each event but the first whether the
    event before it has the same user. `known_items` holds the ids of all items, sorted.
    """
    first, last = int(item_id.min()), int(item_id.max())
    # Each pair (user, item) gets one int64 key. If item ids are too far apart for such keys (hashes of strings are),
    # the items are first numbered from 0.
    if (last - first + 1) * len(per_user) < 1 << 62:
        keys, span = item_id - first, last - first + 1
    else:
        keys, span = np.searchsorted(known_items, item_id), len(known_items)
    keys += np.repeat(np.arange(len(per_user), dtype=np.int64) * span, per_user)
    keys.sort()
    distinct = 1 + int((keys[1:] != keys[:-1]).sum())
    immediate = int((same_user & (item_id[1:] == item_id[:-1])).sum())
    return len(item_id) - distinct, immediate


def _births(items: pa.Table, first_ms: int, last_ms: int) -> dict[str, float]:
    """Returns the spread of the times at which items appear, where 0 is the first event of the log and 1 is the last.

    The time of an item is its birth_ms. If the table has no births, it is the time of the item's first event.
    """
    column = items["birth_ms"] if "birth_ms" in items.column_names else items["first_ms"]
    births = column.drop_null().to_numpy().astype(np.float64)
    if not len(births):
        return {}
    return _spread(np.clip((births - first_ms) / max(last_ms - first_ms, 1), 0.0, 1.0))
