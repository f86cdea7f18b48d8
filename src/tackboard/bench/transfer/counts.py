"""Describes the examples of a transfer task by counts, for baselines that read no sequence.

The input is a prepared dataset and examples of a task on it (data.py). The output is a row of numbers per example. The
numbers come from three groups of events: all earlier events of the user; every event with the same item that is among
the first 70% of its user's events (pretraining reads these events too); and the user's event before the example.
Decided: no number tells the time of the example, because the models that the baselines are compared with do not read
the time either. Shares are damped, as if there were ten more events with the mean share (one more for the newest
events).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.bench.transfer.data import (
    PRETRAINED_SHARE,
    Examples,
    Indices,
    Task,
    is_one_of,
    rising,
    same_pairs,
    share_of,
    times_met,
    user_offsets,
)
from tackboard.events.dataset import open_dataset
from tackboard.events.schema import numpy_column
from tackboard.features.column import ranges

NAMES = (
    "user's events",
    "user's share of yes",
    "user's share of yes beyond that of the items",
    "share of yes in the user's newest events",
    "item's events",
    "item's share of yes",
    "user's events with the item",
    "user's yes with the item",
    "same item as the event before",
    "yes in the event before",
)
SAME_AS_BEFORE = NAMES.index("same item as the event before")
DAMPING = 10.0
NEWEST = 5
Numbers = NDArray[np.float64]


def describe_examples(path: Path, task: Task, *groups: Examples) -> list[Numbers]:
    """Returns the numbers of NAMES for each example of each group [E, F]. `path` is the dataset of the task."""
    events, offsets = open_dataset(path).read_events(["user_id", "item_id", "time_ms", "action"]), user_offsets(path)
    users, items = numpy_column(events, "user_id"), numpy_column(events, "item_id")
    rows = describe_events(users, items, is_one_of(events, task.actions), offsets)
    times = rising(numpy_column(events, "time_ms"), offsets)
    return [rows[find_events(users, times, group)] for group in groups]


def find_events(users: Indices, times: Indices, examples: Examples) -> Indices:
    """Returns the place of each example among the events [E]. No two events have the same user and time."""
    places = pa.table({"user": users, "time": times, "place": np.arange(len(users))})
    asked = pa.table({"user": examples.users, "time": examples.times, "order": np.arange(len(examples))})
    found = asked.join(places, ["user", "time"]).sort_by("order")
    return numpy_column(found, "place")


def describe_events(users: Indices, items: Indices, is_yes: NDArray[np.bool_], offsets: Indices) -> Numbers:
    """Returns the numbers of NAMES for each event [N, F]. The events of a user are in order and follow each other."""
    yes = is_yes.astype(np.float64)
    known = ranges(offsets[:-1], share_of(offsets, PRETRAINED_SHARE))
    mean = float(yes[known].mean()) if len(known) else 0.5
    _, codes = np.unique(items, return_inverse=True)
    item_events = np.bincount(codes[known], minlength=codes.max(initial=-1) + 1).astype(np.float64)
    item_yes = np.bincount(codes[known], yes[known], minlength=len(item_events))
    item_share = damped(item_yes, item_events, mean)[codes]

    place = np.arange(len(users)) - np.repeat(offsets[:-1], np.diff(offsets))
    before = _sum_before(yes, place)
    expected = _sum_before(item_share, place)
    newest = np.minimum(place, NEWEST)
    sums = np.append(0.0, np.cumsum(yes))
    yes_of_newest = sums[np.arange(len(users))] - sums[np.arange(len(users)) - newest]

    order, starts = same_pairs(users, items)
    pair_yes = np.empty(len(users))
    sums_of_pairs = np.append(0.0, np.cumsum(yes[order]))
    pair_yes[order] = sums_of_pairs[:-1] - sums_of_pairs[starts]

    has_before = place > 0
    same = has_before & (items == np.roll(items, 1))
    columns = (
        np.log1p(place),
        damped(before, place, mean),
        (before - expected) / (place + DAMPING),
        damped(yes_of_newest, newest, mean, 1.0),
        np.log1p(item_events[codes]),
        item_share,
        np.log1p(times_met(users, items)),
        np.log1p(pair_yes),
        same,
        has_before & np.roll(is_yes, 1),
    )
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


def damped(yes: NDArray[Any], counts: NDArray[Any], mean: float, damping: float = DAMPING) -> Numbers:
    """Returns the share of yes, as if there were `damping` more events with the share `mean`."""
    return np.asarray((yes + damping * mean) / (counts + damping))


def _sum_before(values: Numbers, place: Indices) -> Numbers:
    """Returns the sum of `values` over the earlier events of the same user [N]."""
    sums = np.append(0.0, np.cumsum(values))
    here = np.arange(len(values))
    return np.asarray(sums[here] - sums[here - place])
