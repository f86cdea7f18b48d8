"""This rival is a torch IterableDataset over Parquet row groups, tuned by hand, with a vectorised collate function.

Row groups are read in a shuffled order, in windows. A window is a set of row groups that are in memory together; it is
as large as our windows. The segments of a window (pieces of users' histories) are shuffled together and gathered once.
Then a batch only takes a slice of each column and calls the collate function. There are two variants:

    events     reads our events.parquet, and finds users, held-out events and segments in NumPy for each window
    examples   reads a file with one row per segment, prepared beforehand, so it only reads, shuffles and collates

On 2 million events an epoch took 0.29 CPU seconds with `events` and 0.30 with `examples`. So the bench
measures `events`, which needs no second file. Arrow's own `take` of list columns costs about as much as the gather in
NumPy (26 and 24 ms for 23,000 segments).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from rivals import loader_batches
from rivals.loader_batches import Window, gathered, window_of_examples
from tackboard.batch import SequenceBatch


class Contender(loader_batches.Contender, torch.utils.data.IterableDataset[SequenceBatch]):
    """Makes the batches of one epoch. With n workers, each worker reads every n-th window."""

    number = 0

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        self.number = number
        return iter(torch.utils.data.DataLoader(self, batch_size=None, num_workers=num_workers, collate_fn=_unchanged))

    def __iter__(self) -> Iterator[SequenceBatch]:
        return super().epoch(self.number)

    def windows(self, epoch: int, generator: np.random.Generator) -> Iterator[Window]:
        """Yields the segments of this worker, a window of row groups at a time."""
        worker = torch.utils.data.get_worker_info()
        mine, others = (worker.id, worker.num_workers) if worker else (0, 1)
        read, path = self._examples, self.folder / "examples.parquet"
        if self.variant == "events":
            read, path = self._events, Path(self.setting.dataset) / "events.parquet"
        with pq.ParquetFile(path) as file:
            order, size = generator.permutation(file.num_row_groups), self.setting.window_buckets
            firsts = range(0, len(order), size)[mine::others]
            for groups in [np.sort(order[first : first + size]).tolist() for first in firsts]:
                yield read(file, groups, generator)

    def _examples(self, file: pq.ParquetFile, groups: list[int], generator: np.random.Generator) -> Window:
        return window_of_examples(file.read_row_groups(groups, use_threads=False), generator)

    def _events(self, file: pq.ParquetFile, groups: list[int], generator: np.random.Generator) -> Window:
        names = ["user_id", "item_id", "action", "surface", "time_ms"]
        table = file.read_row_groups(groups, columns=names, use_threads=False)
        users = table["user_id"].to_numpy()
        begins = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        ends = np.append(begins[1:], len(users))
        action = _codes(table["action"], self.setting.actions)
        surface = _codes(table["surface"], self.setting.surfaces)
        positive = np.isin(("", *self.setting.actions), self.setting.positive_actions or self.setting.actions)
        is_positive = positive[action]
        positions = np.where(is_positive, np.arange(len(users)), -1)
        newest = np.maximum.reduceat(positions, begins)
        ends = np.where(newest >= begins, newest, ends)
        counts = -(-(ends - begins) // self.setting.max_length)
        owners = np.repeat(np.arange(len(begins)), counts)
        older = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(owners))
        stops = ends[owners] - older * self.setting.max_length
        starts = np.maximum(begins[owners], stops - self.setting.max_length)
        order = generator.permutation(len(owners))
        return gathered(
            users[begins[owners[order]]],
            starts[order],
            (stops - starts)[order],
            {
                "item": table["item_id"].to_numpy(),
                "action": action,
                "surface": surface,
                "time": table["time_ms"].to_numpy(),
                "is_positive": is_positive,
            },
        )


def _codes(column: pa.ChunkedArray, names: tuple[str, ...]) -> NDArray[np.int32]:
    """Returns the position of each value in `names`, counted from 1."""
    encoded = column.unify_dictionaries().combine_chunks()
    places = np.array([names.index(name) + 1 for name in encoded.dictionary.to_pylist()], dtype=np.int32)
    return np.asarray(places.take(encoded.indices.to_numpy()))


def _unchanged(batch: Any) -> Any:
    return batch
