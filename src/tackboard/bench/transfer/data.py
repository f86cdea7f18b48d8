"""This module splits a prepared dataset into datasets for the transfer study: for pretraining and for the task.

    a user's events    ├──────── first 70% ────────┤── to 85% ──┤── rest ──┤
                        pretraining: which item?     examples to  validation or
                                                     train with   test, by user

An example is an event. The model gets the history and the item of the event, but not the action. It must predict
whether the action belongs to a given set, for example a rating of 4 or 5. Pretraining predicts items, so the pretrained
model was not trained on this question. The judged events of a user come last, so neither pretraining nor training has
seen them. A quarter of the users serve to choose settings, and the other users serve for the test.

An example is written as a labelled request at the time of the event, with the item of the event as its only candidate.
Training examples and judged examples are written to two datasets, and each of the two holds all events. Decided: in
both datasets, the times of each user rise strictly (equal times are moved apart by one millisecond), and an event is
received when it happens. So the history of a request consists of all earlier events, in file order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.files import staging_directory
from tackboard.core.progress import say
from tackboard.data.labels import Label, requests_schema
from tackboard.data.request_loader import RequestSteps
from tackboard.evaluation.labelled_requests import damped_means
from tackboard.events.dataset import LABEL, open_dataset, write_dataset
from tackboard.events.schema import numpy_column, starts_of_users
from tackboard.features.column import ranges

PRETRAINED_SHARE, TRAINED_SHARE = 0.70, 0.85
"""Shares of a user's events at which the pretraining part and the training part end."""
VALIDATION_USERS = 0.25
YES = "yes"
"""Name of the label of an example."""
Part = Literal["train", "judge"]
SHARES: dict[Part, tuple[float, float]] = {"train": (PRETRAINED_SHARE, TRAINED_SHARE), "judge": (TRAINED_SHARE, 1.0)}

Indices = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Task:
    """A question about an event."""

    question: str
    actions: tuple[str, ...]
    """The actions that mean yes."""
    only_new: bool = False
    """If true, an event is an example only if no earlier event of the user has the same item."""

    @property
    def words(self) -> str:
        """Describes the task in a table."""
        return f"{self.question}{' (only items that are new to the user)' if self.only_new else ''}"


_MORE_THAN_A_VIEW = Task("is the action more than a view?", ("bookmark", "comment_created", "follow", "like"))
TASKS = {
    "ml-1m": (Task("will the rating be 4 or 5?", ("rating_4", "rating_5")),),
    "deskdrop": (dataclasses.replace(_MORE_THAN_A_VIEW, only_new=True), _MORE_THAN_A_VIEW),
}
"""Dataset → tasks on this dataset. Models are trained for the first task; baselines answer all tasks. If repeated
items count, one bit nearly answers the task on Deskdrop: whether the item is the item of the event before."""


# ---- datasets made from a dataset ----


def task_of(protocol: Mapping[str, Any]) -> Task:
    """Returns the task of a cell, from the cell's protocol."""
    return Task(str(protocol["question"]), tuple(protocol["actions"]), bool(protocol["only_new"]))


def write_beginning(path: Path, ends: Indices, target: Path) -> Path:
    """Writes a dataset at `target` with the first `ends` [U] events of each user of the dataset at `path`.

    `ends` lists users in file order. The new dataset has all items of the catalogue. An existing `target` is kept.
    """
    if target.exists():
        return target
    kept = ranges(user_offsets(path)[:-1], ends)
    return _write(path, target, "beginning", open_dataset(path).read_events().take(pa.array(kept)))


def write_task(path: Path, task: Task, part: Part) -> Path:
    """Writes examples from a part of the dataset at `path` to the folder that `task_dataset` returns, unless it exists.

    The label of an example is yes if its action is in `task.actions`. An event without a history is not an example.
    """
    target = task_dataset(path, part, only_new=task.only_new)
    if target.exists():
        return target
    events, offsets = open_dataset(path).read_events(), user_offsets(path)
    times = pa.array(rising(numpy_column(events, "time_ms"), offsets))
    for name in ("time_ms", "received_ms"):
        events = events.set_column(events.column_names.index(name), name, times)
    first, last = (share_of(offsets, share) for share in SHARES[part])
    first = np.maximum(first, 1)
    chosen = ranges(offsets[:-1] + first, np.maximum(last - first, 0))
    if task.only_new:
        chosen = chosen[times_met(numpy_column(events, "user_id"), numpy_column(events, "item_id"))[chosen] == 0]
    rows = events.take(pa.array(chosen))
    places = np.arange(rows.num_rows + 1, dtype=np.int32)
    values = {
        "item_id": numpy_column(rows, "item_id"),
        "position": pa.nulls(rows.num_rows, pa.int32()),
        "weight": np.ones(rows.num_rows, dtype=np.float32),
        LABEL + YES: is_one_of(rows, task.actions).astype(np.int8),
    }
    lists = {name: pa.ListArray.from_arrays(places, pa.array(value)) for name, value in values.items()}
    columns = {name: rows[name] for name in ("user_id", "time_ms", "surface")} | {"request": places[:-1]} | lists
    schema = requests_schema([Label(YES, 1)], pa.int64())
    requests = pa.table({name: columns[name] for name in schema.names}).cast(schema)
    return _write(path, target, "task", events, requests)


def _write(path: Path, target: Path, kind: str, events: pa.Table, requests: pa.Table | None = None) -> Path:
    dataset = open_dataset(path)
    say(f"writing {target.name}: {events.num_rows:,} of {dataset.num_events:,} events")
    with staging_directory(target) as making:
        snapshot = write_dataset(
            making,
            dataset.name,
            events.drop_columns(["user_id", "item_id"]),
            item_attributes=dataset.read_items(["item"]),
            requests=requests,
            source={**dict(dataset.manifest["source"]), "kind": kind, "of": path.name},
        )
        if not target.exists():
            os.rename(snapshot, target)
    return target


def task_dataset(path: Path, part: Part, *, only_new: bool = False) -> Path:
    """Returns the path of the examples that are made from a part of the dataset at `path`."""
    return path.with_name(f"{path.name}-{part}{'-new' if only_new else ''}")


def times_met(users: Indices, items: Indices) -> Indices:
    """Returns how many earlier events of the user have the item of each event [N]. A user's events are in order."""
    order, starts = same_pairs(users, items)
    counts = np.empty(len(users), dtype=np.int64)
    counts[order] = np.arange(len(users)) - starts
    return counts


def same_pairs(users: Indices, items: Indices) -> tuple[Indices, Indices]:
    """Returns an order in which events with the same user and item follow each other, earlier events first [N].

    Also returns, for each event in this order, the place of the first event with its user and item [N].
    """
    order = np.lexsort((np.arange(len(users)), items, users))
    is_first = np.ones(len(users), dtype=np.bool_)
    is_first[1:] = (np.diff(users[order]) != 0) | (np.diff(items[order]) != 0)
    return order, np.maximum.accumulate(np.where(is_first, np.arange(len(users)), 0))


def user_offsets(path: Path) -> Indices:
    """Returns the index of the first event of each user in the dataset, and the total number of events [U + 1]."""
    users = numpy_column(open_dataset(path, verify=False).read_events(["user_id"]), "user_id")
    return np.append(starts_of_users(users), len(users)).astype(np.int64)


def share_of(offsets: Indices, share: float) -> Indices:
    """Returns the number of events in the first `share` of each user's events, rounded down [U]."""
    return np.floor(np.diff(offsets) * share).astype(np.int64)


def rising(times: Indices, offsets: Indices) -> Indices:
    """Returns the times [N], moved by whole milliseconds if needed, so that the times of each user rise strictly."""
    places = np.arange(len(times)) - np.repeat(offsets[:-1], np.diff(offsets))
    spare = times - places
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        np.maximum.accumulate(spare[begin:end], out=spare[begin:end])
    return np.asarray(spare + places)


def is_one_of(events: pa.Table, actions: tuple[str, ...]) -> NDArray[np.bool_]:
    """Returns whether the action of each event is in `actions` [N]."""
    return np.asarray(pc.is_in(events["action"].cast(pa.string()), pa.array(actions)).to_numpy())


# ---- examples, and predictions without a model ----


@dataclasses.dataclass(frozen=True)
class Examples:
    """The users, the items, the answers and the times of examples [E]."""

    users: Indices
    items: Indices
    labels: NDArray[np.bool_]
    times: Indices

    def __len__(self) -> int:
        return len(self.users)

    @classmethod
    def of(cls, steps: RequestSteps) -> Examples:
        """Returns the examples that `steps` read in one pass, in file order."""
        table = steps.source.read_requests(np.arange(steps.source.num_buckets))
        table = table.take(steps.chosen(table))
        return cls(table.user_ids, table.item_ids, table.labels[YES] == 1, table.times)


def additive_means(
    examples: Examples, asked: Examples, *, with_users: bool, damping: float = 10.0
) -> NDArray[np.float64]:
    """Estimates the probability of a yes for each example in `asked`. The estimate is the item's mean over `examples`.

    If `with_users`, the user's mean deviation from the item means is added. The mean of an item or user with few
    examples is pulled towards the overall mean, as if there were `damping` more examples with the overall mean.
    """
    mean = float(examples.labels.mean()) if len(examples) else 0.5
    rest = examples.labels - mean
    total = mean + damped_means(examples.items, rest, asked.items, damping)
    if with_users:
        rest = rest - damped_means(examples.items, rest, examples.items, damping)
        total = total + damped_means(examples.users, rest, asked.users, damping)
    return np.asarray(total)
