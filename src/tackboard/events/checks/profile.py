"""This module describes the events of a snapshot as plain JSON, for `tackboard data stats`.

Events are read one bucket (a group of users) at a time and counted into fixed bins. Memory holds one number per item
and per user. The result names no user. The quantiles of gaps, lateness and candidates per request come from a sample if
there are more than 65,536 values, and are then marked `estimated`. The same data always gives the same sample. All
other numbers are exact, unless there are more than 100,000 different actions or surfaces.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.events.checks.measures import (
    DAY_MS,
    IdCounts,
    NameCounts,
    Sample,
    Slice,
    columns_of,
    hours_in,
    names_in,
    numbers_in,
    user_counts_in,
)
from tackboard.events.dataset import LABEL, REQUESTS, Dataset
from tackboard.events.schema import numpy_column
from tackboard.events.stored_tables import column_bytes, reading, row_groups

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
DURATIONS_S: tuple[tuple[str, float], ...] = (
    ("0", 0.0),
    ("under 1 s", 1.0),
    ("1 to 10 s", 10.0),
    ("10 to 60 s", 60.0),
    ("1 to 10 min", 600.0),
    ("10 to 60 min", 3600.0),
    ("1 to 6 h", 21_600.0),
    ("6 to 24 h", 86_400.0),
    ("1 to 7 days", 604_800.0),
    ("7 to 30 days", 2_592_000.0),
)
"""Name and upper bound (s) of each bin. Negative times count as `0`, and times above 30 days as `over 30 days`."""
COUNTS: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 16_000)
"""The smallest number of events per user in each bin."""
NUM_RANKS = 60
NUM_TOP_ITEMS = 10


def profile(dataset: Dataset) -> dict[str, Any]:
    """Returns what `data stats` shows. Shares lie in [0, 1], times are in seconds, and days are UTC."""
    actions, surfaces, items, days = NameCounts(), NameCounts(), IdCounts(), IdCounts()
    hours = np.zeros(24, dtype=np.int64)
    user_counts: list[NDArray[np.int64]] = []
    durations = {name: _Durations() for name in ("gap_s", "lateness_s")}
    missing = dict.fromkeys(dataset.fields, 0)
    for table in Slice(dataset).chunks(columns_of(dataset)):
        actions.add(names_in(table, "action"))
        surfaces.add(names_in(table, "surface"))
        items.add(numpy_column(table, "item_id"))
        days.add(numpy_column(table, "time_ms") // DAY_MS)
        hours += np.bincount(hours_in(table), minlength=24)
        user_counts.append(user_counts_in(table))
        for name, counted in durations.items():
            counted.add(numbers_in(table, name))
        for name in missing:
            missing[name] += table[name].null_count
    per_user = np.concatenate(user_counts)
    (item_ids, per_item), (day_numbers, per_day) = items.result(), days.result()
    num_events = int(per_user.sum())
    return {
        "dataset": dataset.name,
        "snapshot": dataset.path.name,
        "num_events": num_events,
        "num_users": len(per_user),
        "num_items": len(item_ids),
        "num_items_listed": dataset.num_items,
        "days": {
            "first": str(np.datetime64(int(day_numbers[0]), "D")),
            "day": (day_numbers - day_numbers[0]).tolist(),
            "events": per_day.tolist(),
        },
        "hours": hours.tolist(),
        "actions": _shares(actions),
        "surfaces": _shares(surfaces),
        "events_per_user": _per_user(per_user),
        "items": _popularity(dataset, item_ids, per_item),
        "gap_s": durations["gap_s"].to_json(),
        "lateness_s": durations["lateness_s"].to_json(),
        "catalogue": _growth(dataset),
        "fields": {
            name: {"type": kind, "missing_share": missing[name] / num_events} for name, kind in dataset.fields.items()
        },
        "requests": _requests(dataset.path / REQUESTS),
        "files": _file_sizes(dataset),
    }


class _Durations:
    def __init__(self) -> None:
        self._bounds = np.array([bound for _, bound in DURATIONS_S])
        self._counts = np.zeros(len(DURATIONS_S) + 1, dtype=np.int64)
        self._sample = Sample()
        self._num_negative = 0

    def add(self, seconds: NDArray[np.float64]) -> None:
        self._num_negative += int((seconds < 0).sum())
        self._counts += np.bincount(np.searchsorted(self._bounds, seconds, side="left"), minlength=len(self._counts))
        self._sample.add(seconds)

    def to_json(self) -> dict[str, Any]:
        labels = [label for label, _ in DURATIONS_S] + ["over 30 days"]
        return {
            "bins": dict(zip(labels, self._counts.tolist(), strict=True)),
            "num_negative": self._num_negative,
            "estimated": not self._sample.is_whole,
            "quantiles": _by_share(self._sample.quantiles(SHARES)),
        }


def _by_share(quantiles: NDArray[np.float64]) -> dict[str, float]:
    """Maps names such as `q50` to the quantiles at SHARES. Returns an empty dict if there are no quantiles."""
    return {f"q{round(100 * q)}": float(value) for q, value in zip(SHARES, quantiles, strict=False)}


def _shares(names: NameCounts) -> dict[str, float]:
    total = sum(names.counts.values())
    return {name: names.counts[name] / total for name in names.top(len(names.counts))}


def _per_user(per_user: NDArray[np.int64]) -> dict[str, Any]:
    place = np.searchsorted(np.array(COUNTS), per_user, side="right") - 1
    counted = np.bincount(place, minlength=len(COUNTS))
    labels = [
        f"{first:,}" if after == first + 1 else f"{first:,} to {after - 1:,}"
        for first, after in itertools.pairwise(COUNTS)
    ]
    return {
        "bins": dict(zip([*labels, f"{COUNTS[-1]:,} or more"], counted.tolist(), strict=True)),
        "mean": float(per_user.mean()),
        "max": int(per_user.max()),
        "quantiles": _by_share(np.quantile(per_user, SHARES)),
    }


def _popularity(dataset: Dataset, item_ids: NDArray[np.int64], per_item: NDArray[np.int64]) -> dict[str, Any]:
    order = np.lexsort((item_ids, -per_item))
    ranks = np.unique(np.geomspace(1, len(order), NUM_RANKS).round().astype(np.int64))
    listed = dataset.read_items(["item", "item_id"])
    top = order[:NUM_TOP_ITEMS]
    place = np.searchsorted(numpy_column(listed, "item_id"), item_ids[top])
    names = listed["item"].take(place).to_pylist()
    return {
        "rank": ranks.tolist(),
        "events": per_item[order[ranks - 1]].tolist(),
        "top": [{"item": name, "events": int(per_item[one])} for name, one in zip(names, top, strict=True)],
        "top_1_percent_share": float(per_item[order[: max(1, len(order) // 100)]].sum() / per_item.sum()),
    }


def _growth(dataset: Dataset) -> dict[str, Any]:
    """Returns the days on which an item appears, and the number of items that exist at the end of each of these days.

    An item appears at its birth or, if the table of items has no births, at its first event.
    """
    held = pq.read_schema(dataset.path / "items.parquet").names
    name = "birth_ms" if "birth_ms" in held else "first_ms"
    births = dataset.read_items([name])[name].drop_null().to_numpy()
    if not len(births):
        return {"by": name, "day": [], "items": []}
    start = int(dataset.statistics["first_ms"]) // DAY_MS
    # Items that are older than the first event are counted on the day of the first event.
    days, counts = np.unique(np.maximum(births // DAY_MS - start, 0), return_counts=True)
    return {"by": name, "day": days.tolist(), "items": np.cumsum(counts).tolist()}


def _requests(path: Path) -> dict[str, Any] | None:
    """Counts the requests, candidates and positive, negative and unknown labels. Returns None if no file exists."""
    if not path.is_file():
        return None
    num_requests, sizes, sample = 0, 0, Sample()
    labels: dict[str, NDArray[np.int64]] = {}
    with reading(path):
        names = [name for name in pq.read_schema(path).names if name.startswith(LABEL)]
    for table in row_groups(path, ["item_id", *names]):
        lengths = pc.list_value_length(table["item_id"]).fill_null(0).to_numpy()
        num_requests += table.num_rows
        sizes += int(lengths.sum())
        sample.add(lengths.astype(np.float64))
        for name in names:
            values = pc.list_flatten(table[name])
            ones = pc.sum(values.cast(pa.int64())).as_py() or 0
            known = len(values) - values.null_count
            counts = np.array([ones, known - ones, values.null_count])
            labels[name] = labels.get(name, np.zeros(3, dtype=np.int64)) + counts
    return {
        "num_requests": num_requests,
        "num_candidates": sizes,
        "estimated": not sample.is_whole,
        "candidates_per_request": _by_share(sample.quantiles(SHARES)),
        "labels": {
            name.removeprefix(LABEL): dict(zip(("positive", "negative", "unknown"), counts.tolist(), strict=True))
            for name, counts in labels.items()
        },
    }


def _file_sizes(dataset: Dataset) -> dict[str, Any]:
    """Returns the size in bytes of every file, and the compressed bytes of every column of the Parquet files."""
    sizes: dict[str, Any] = {}
    for entry in dataset.manifest["files"]:
        name = str(entry["name"])
        sizes[name] = {"bytes": int(entry["bytes"]), "columns": {}}
        if name.endswith(".parquet"):
            metadata = pq.read_metadata(dataset.path / name)
            columns = dict(column_bytes(metadata, range(metadata.num_row_groups)))
            sizes[name] |= {"num_rows": metadata.num_rows, "columns": columns}
    return sizes
