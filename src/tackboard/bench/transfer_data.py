"""What a model is pretrained on and what it is asked afterwards: a prepared dataset in, three parts of it out.

    a user's events    ├──────── first 70% ────────┤── to 85% ──┤── rest ──┤
                        pretraining: which item?     examples to  validation or
                                                     train with   test, by user

An example is an event: its history and its item are given, and the question is whether its action is one of some. Which
one it was is no input, and pretraining, which predicts items, was never asked. A user's events for training and for
judging come after those of pretraining, so nothing that is judged was seen before; a quarter of the users choose
settings, the others are the test.

Examples of one user that lie near each other share a run of events, because a causal model answers for every place of a
run at once. Decided: a run begins half of what the model reads before its first example, so every example has at least
that much history, if there is so much, and at most all.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core import keyed_random
from tackboard.core.files import staging_directory
from tackboard.core.progress import say
from tackboard.data.index import ItemFrequencies
from tackboard.data.loader import stored_batch
from tackboard.data.sequences import Sequences
from tackboard.evaluation.requests import damped_means
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.schema import numpy_column, starts_of_users
from tackboard.features.column import offsets_of, ranges

PRETRAINED_SHARE, TRAINED_SHARE = 0.70, 0.85
"""Where the parts of a user's events end."""
VALIDATION_USERS = 0.25
SPLIT_STREAM, SAMPLE_STREAM = 41, 42
"""Keep the draws of users and of examples apart from every other use of a seed."""

Indices = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Task:
    """A question about an event."""

    question: str
    actions: tuple[str, ...]
    """The actions that mean yes."""


TASKS = {
    "ml-1m": Task("will the rating be 4 or 5?", ("rating_4", "rating_5")),
    "deskdrop": Task("is it more than a view?", ("bookmark", "comment_created", "follow", "like")),
}
"""Dataset → the task that a model is asked there."""


# ---- datasets that end early ----


def write_beginning(path: Path, ends: Indices, target: Path) -> Path:
    """Writes the dataset at `target` that has only the first `ends` [U] events of each user of the one at `path`.

    Users are in the order of the file. The catalogue stays whole. One that is there already is left alone.
    """
    if target.exists():
        return target
    dataset = open_dataset(path)
    events = dataset.read_events().drop_columns(["user_id", "item_id"])
    offsets = user_offsets(path)
    kept = ranges(offsets[:-1], ends)
    say(f"writing {target.name}: {len(kept):,} of {events.num_rows:,} events")
    with staging_directory(target) as making:
        snapshot = write_dataset(
            making,
            dataset.name,
            events.take(pa.array(kept)),
            item_attributes=dataset.read_items(["item"]),
            source={**dict(dataset.manifest["source"]), "kind": "beginning", "of": path.name},
        )
        if not target.exists():
            os.rename(snapshot, target)
    return target


def user_offsets(path: Path) -> Indices:
    """Where each user's events begin in a dataset's file, and where the last one's end [U + 1]."""
    users = numpy_column(open_dataset(path, verify=False).read_events(["user_id"]), "user_id")
    return np.append(starts_of_users(users), len(users)).astype(np.int64)


def share_of(offsets: Indices, share: float) -> Indices:
    """How many events the first `share` of each user are [U], rounded down."""
    return np.floor(np.diff(offsets) * share).astype(np.int64)


# ---- examples ----


@dataclasses.dataclass(frozen=True)
class Examples:
    """Events by index, rising, with the user (position) and the answer of each [E]."""

    events: Indices
    users: Indices
    labels: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.events)

    def take(self, chosen: Indices) -> Examples:
        """Some of them, in the order of events."""
        rising = np.sort(chosen)
        return Examples(self.events[rising], self.users[rising], self.labels[rising])

    def dense_users(self) -> Indices:
        """The users numbered 0, 1, … as far as they have examples [E]."""
        return np.unique(self.users, return_inverse=True)[1].astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Split:
    """The examples of a task."""

    train: Examples
    validation: Examples
    test: Examples


def split_examples(sequences: Sequences) -> Split:
    """The examples of sequences whose `is_positive` are the answers; an event without any history is none."""
    sizes = np.diff(sequences.offsets)
    first, second = (share_of(sequences.offsets, share) for share in (PRETRAINED_SHARE, TRAINED_SHARE))
    draw = keyed_random.uniform(0, SPLIT_STREAM, sequences.user_ids)
    judges = draw < VALIDATION_USERS
    train = _between(sequences, np.maximum(first, 1), second)
    rest = _between(sequences, np.maximum(second, 1), sizes)
    return Split(
        train=train,
        validation=rest.take(np.flatnonzero(judges[rest.users])),
        test=rest.take(np.flatnonzero(~judges[rest.users])),
    )


def _between(sequences: Sequences, begins: Indices, ends: Indices) -> Examples:
    """Each user's events number `begins` to `ends`."""
    counts = np.maximum(ends - begins, 0)
    events = ranges(sequences.offsets[:-1] + begins, counts)
    users = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return Examples(events, users, sequences.is_positive[events])


def sample(examples: Examples, count: int, seed: int) -> Examples:
    """`count` of the examples, drawn by the seed, or all where that is 0 or more than there are.

    Of the same seed a smaller draw is part of a larger one.
    """
    if not count or count >= len(examples):
        return examples
    return examples.take(keyed_random.permutation(len(examples), seed, SAMPLE_STREAM)[:count])


# ---- runs ----


@dataclasses.dataclass(frozen=True)
class RunBatch:
    """Runs of events as tensors. `events` [P] are the places of the examples among the batch's events."""

    histories: SequenceBatch
    events: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> RunBatch:
        """The same on `device`."""
        return RunBatch(self.histories.to(device), self.events.to(device), self.labels.to(device))


class Runs:
    """Examples, and runs of events that hold them."""

    def __init__(self, sequences: Sequences, examples: Examples, hashing: HashConfig, max_history: int) -> None:
        """A run has at most `max_history` events, its examples included."""
        self.sequences = sequences
        self.examples = examples
        self.hashing = hashing
        self.users, self.starts, self.bounds = cut_runs(sequences.offsets, examples, max_history)

    def __len__(self) -> int:
        return len(self.users)

    def batch(self, chosen: Indices) -> RunBatch:
        """The runs numbered `chosen`, with their examples run by run, rising in each."""
        counts = np.diff(self.bounds)[chosen]
        of_examples = ranges(self.bounds[:-1][chosen], counts)
        events = self.examples.events[of_examples]
        lengths = self.examples.events[self.bounds[1:][chosen] - 1] + 1 - self.starts[chosen]
        first = np.repeat(offsets_of(lengths)[:-1] - self.starts[chosen], counts)
        return RunBatch(
            histories=stored_batch(
                self.sequences, self.users[chosen], self.starts[chosen], lengths, self.hashing, self._no_frequencies
            ),
            events=torch.from_numpy(events + first),
            labels=torch.from_numpy(self.examples.labels[of_examples].astype(np.float32)),
        )

    def shuffled(self, per_step: int, seed: int, *key: int) -> list[Indices]:
        """All runs in a random order, `per_step` at a time."""
        return in_steps(keyed_random.permutation(len(self), seed, *key), per_step)

    def in_order(self, per_step: int) -> list[Indices]:
        """All runs, so that the examples of the batches are `examples` in their order."""
        return in_steps(np.arange(len(self), dtype=np.int64), per_step)

    @functools.cached_property
    def _no_frequencies(self) -> ItemFrequencies:
        # Asks `stored_batch` for what was known before every event; no loss here corrects popularity.
        return ItemFrequencies(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def in_steps(order: Indices, per_step: int) -> list[Indices]:
    """`order`, cut into pieces of `per_step`."""
    return [order[begin : begin + per_step] for begin in range(0, len(order), per_step)]


def cut_runs(offsets: Indices, examples: Examples, max_history: int) -> tuple[Indices, Indices, Indices]:
    """(user, first event, bounds among the examples [R + 1]) of the runs that hold all examples."""
    users, starts, bounds = [], [], []
    user, last = -1, -1
    pairs = zip(examples.users.tolist(), examples.events.tolist(), strict=True)
    for place, (of, event) in enumerate(pairs):
        if of != user or event > last:
            start = max(int(offsets[of]), event - max_history // 2)
            user, last = of, start + max_history - 1
            users.append(of)
            starts.append(start)
            bounds.append(place)
    return tuple(np.array(part, dtype=np.int64) for part in (users, starts, [*bounds, len(examples)]))  # type: ignore[return-value]


# ---- what needs no model ----


def additive_means(
    examples: Examples, item_ids: Indices, asked: Examples, *, with_users: bool, damping: float = 10.0
) -> NDArray[np.float64]:
    """The chance of a yes for each of `asked` from means over `examples`: of the item, and what the user adds to it.

    An item or user of few examples is drawn towards the mean of all, as if `damping` further ones had it. `item_ids`
    are those of all events.
    """
    mean = float(examples.labels.mean()) if len(examples) else 0.5
    items, known = item_ids[examples.events], item_ids[asked.events]
    rest = examples.labels - mean
    of_items = damped_means(items, rest, known, damping)
    total = mean + of_items
    if with_users:
        rest = rest - damped_means(items, rest, items, damping)
        total = total + damped_means(examples.users, rest, asked.users, damping)
    return np.asarray(total)


def before_judging(sequences: Sequences) -> Examples:
    """Every event that comes before those that are judged, as an example: all that anybody could know."""
    ends = share_of(sequences.offsets, TRAINED_SHARE)
    return _between(sequences, np.zeros(len(ends), dtype=np.int64), ends)


def facts_of(split: Split) -> Mapping[str, Any]:
    """How many examples there are, and how many of them are yes."""
    return {
        "num_train": len(split.train),
        "num_validation": len(split.validation),
        "num_test": len(split.test),
        "num_test_users": len(np.unique(split.test.users)),
        "share_yes": round(float(split.test.labels.mean()), 4) if len(split.test) else None,
    }
