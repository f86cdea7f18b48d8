"""This module holds the code that the rivals of `tackboard bench loader` share: windows, steps and collation.

Segments (pieces of users' histories) come as NumPy arrays, or as a table of examples. This module cuts them into the
batches that `tackboard.bench.loader.data.Setting` describes, as the tensors of `SequenceBatch`. A rival only implements
how it reads windows (sets of segments that are shuffled together). The rivals do not call our `make_batch`.

Four ways to find the distinct items of a batch were measured, in CPU ms. The last way is used:

                                            4,096 events (2,158 distinct items)   16,384 events
    np.unique                               0.18                                  1.02
    torch.unique                            0.17                                  1.33
    Arrow's dictionary_encode with a sort   0.18                                  0.70
    pandas.factorize with a sort            0.14                                  0.45

Looking up the rows of the 2,158 items in a table of all items takes 0.12 ms. Hashing the items again takes 0.16 ms.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from tackboard.batch import SequenceBatch
from tackboard.bench.loader.data import EXAMPLE_COLUMNS, Setting

Window = tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[Any]]]
"""Users [G], offsets [G+1] from 0, and EXAMPLE_COLUMNS over the events of G shuffled segments."""


class Collate:
    """Turns segments into batches. It holds the table rows and the log shares of all items."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder that `data.prepare` wrote."""
        import pandas

        self._factorize = pandas.factorize
        with np.load(folder / "items.npz") as items:
            self._item_ids, self._rows, self._log_q = items["item_ids"], items["rows"], items["log_q"]

    def __call__(
        self, users: NDArray[np.int64], offsets: NDArray[np.int64], columns: dict[str, NDArray[Any]]
    ) -> SequenceBatch:
        """Makes a batch of B segments from `users` [B], `offsets` [B+1] from 0, and EXAMPLE_COLUMNS of their events."""
        codes, found = self._factorize(columns["item"])
        order = np.argsort(found)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        distinct = found[order]
        known = self._item_ids.searchsorted(distinct)
        return SequenceBatch(
            offsets=torch.from_numpy(offsets),
            users=torch.from_numpy(users.copy()),
            items=torch.from_numpy(place.take(codes)),
            columns={name: torch.from_numpy(columns[name].astype(np.int64)) for name in ("action", "surface", "time")},
            request={},
            is_positive=torch.from_numpy(columns["is_positive"].copy()),
            item_ids=torch.from_numpy(distinct),
            item_rows=torch.from_numpy(self._rows.take(known, axis=0)),
            item_log_q=torch.from_numpy(self._log_q.take(known)),
        )


class Contender(abc.ABC):
    """A rival that reads one window after the other; see `tackboard.bench.loader.contender`."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.folder, self.variant = folder, variant
        self.setting, self.collate = Setting.read(folder), Collate(folder)

    @abc.abstractmethod
    def windows(self, epoch: int, generator: np.random.Generator) -> Iterator[Window]:
        """Yields the segments of an epoch, a window at a time."""

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        del num_workers
        generator = np.random.default_rng([self.setting.seed, number])
        return batches(self.collate, self.setting.tokens_per_step, self.windows(number, generator))


def batches(collate: Collate, tokens_per_step: int, windows: Iterator[Window]) -> Iterator[SequenceBatch]:
    """Yields batches of at most `tokens_per_step` events. The rest of a window joins the next window's first batch."""
    rest: Window | None = None
    for window in windows:
        users, offsets, columns = window
        first = 0
        if rest is not None:
            old_users, old_offsets, old_columns = rest
            # Only the first batch is concatenated with the rest, so that no large column is copied.
            first = int(np.searchsorted(offsets, tokens_per_step - old_offsets[-1], side="right")) - 1
            end = int(offsets[first])
            yield collate(
                np.concatenate([old_users, users[:first]]),
                np.concatenate([old_offsets, offsets[1 : first + 1] + old_offsets[-1]]),
                {name: np.concatenate([old_columns[name], columns[name][:end]]) for name in EXAMPLE_COLUMNS},
            )
            rest = None
        while first < len(users):
            after = int(np.searchsorted(offsets, offsets[first] + tokens_per_step, side="right")) - 1
            begin, end = int(offsets[first]), int(offsets[after])
            part = users[first:after], offsets[first : after + 1] - begin
            events = {name: columns[name][begin:end] for name in EXAMPLE_COLUMNS}
            if after == len(users):
                rest = part[0].copy(), part[1], {name: values.copy() for name, values in events.items()}
            else:
                yield collate(*part, events)
            first = after
        # Frees the window before the next one is read, because two windows would take twice the memory.
        window = users = offsets = columns = part = events = None  # type: ignore[assignment]
    if rest is not None:
        yield collate(*rest)


def window_of_examples(table: pa.Table, generator: np.random.Generator) -> Window:
    """Returns the rows of a table of examples, shuffled."""
    # A column with a single chunk is not copied.
    columns = {name: table[name] for name in EXAMPLE_COLUMNS}
    lists = {name: c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for name, c in columns.items()}
    offsets = lists["item"].offsets.to_numpy()
    order = generator.permutation(table.num_rows)
    values = {name: array.values.to_numpy(zero_copy_only=False) for name, array in lists.items()}
    users = table["user_id"].to_numpy()
    return gathered(users[order], offsets[:-1][order], np.diff(offsets)[order], values)


def gathered(
    users: NDArray[np.int64], starts: NDArray[Any], lengths: NDArray[Any], columns: dict[str, NDArray[Any]]
) -> Window:
    """Returns the segments in the given order, with their events end to end."""
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    events = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return users, offsets, {name: values.take(events) for name, values in columns.items()}
