"""Rival: Hugging Face `datasets` over its memory-mapped Arrow file, one row per segment.

Variants, both measured:

    torch   torch format: whole steps of rows by a shuffled index, each column a list of tensors, joined by torch.cat
    arrow   Arrow format: contiguous blocks of rows in a shuffled order, a window of them shuffled and gathered in NumPy

Tried too, in rows per CPU-second before any collate: in Arrow format `to_iterable_dataset().shuffle(buffer_size)`
54,000 and rows by a shuffled index 319,000, in NumPy format such rows 19,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tackboard.batch import SequenceBatch
from tackboard.bench.loader.arrow import window_of_examples
from tackboard.bench.loader.collate import Collate, Steps
from tackboard.bench.loader.data import EXAMPLE_COLUMNS, Setting

BLOCK_ROWS = 1_024
"""Rows read at a time: as in our buckets, neighbours come together, and a window mixes many blocks."""


class Contender:
    """See `rival`."""

    def __init__(self, folder: Path, variant: str) -> None:
        import datasets

        self._setting = Setting.read(folder)
        self._collate = Collate(folder)
        self._variant = variant
        self._dataset: Any = datasets.Dataset.from_file(str(folder / "examples.arrow")).with_format(variant)
        parts = self._dataset.with_format("arrow").iter(BLOCK_ROWS) if variant == "torch" else ()
        # How many events each row has: what a batch of so many events needs to know, looked up once.
        self._lengths = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(pc.list_value_length(part["item"]).to_numpy() for part in parts)]
        )
        self._window_rows = self._setting.window_rows(len(self._dataset))

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        """The batches of an epoch."""
        del num_workers
        generator = np.random.default_rng([self._setting.seed, number])
        return self._arrow(generator) if self._variant == "arrow" else self._torch(generator)

    def _arrow(self, generator: np.random.Generator) -> Iterator[SequenceBatch]:
        total = len(self._dataset)
        order = generator.permutation(-(-total // BLOCK_ROWS)) * BLOCK_ROWS
        blocks = max(1, self._window_rows // BLOCK_ROWS)
        windows = [order[first : first + blocks] for first in range(0, len(order), blocks)]
        steps = Steps(self._collate, self._setting.tokens_per_step)
        for number, firsts in enumerate(windows):
            parts = [self._dataset[int(first) : min(int(first) + BLOCK_ROWS, total)] for first in np.sort(firsts)]
            window = window_of_examples(pa.concat_tables(parts), generator)
            yield from steps.add(*window, last=number == len(windows) - 1)

    def _torch(self, generator: np.random.Generator) -> Iterator[SequenceBatch]:
        import torch

        lengths = (
            np.concatenate(
                [[len(row) for row in part["item"]] for part in self._dataset.with_format("numpy").iter(4096)]
            )
            if self._lengths is None
            else self._lengths
        )
        self._lengths = lengths
        order = generator.permutation(len(lengths))
        ends = np.cumsum(lengths[order])
        first = 0
        while first < len(order):
            begin = int(ends[first - 1]) if first else 0
            after = int(np.searchsorted(ends, begin + self._setting.tokens_per_step, side="right"))
            rows = self._dataset[order[first:after].tolist()]
            columns = {name: torch.cat(list(rows[name])).numpy() for name in EXAMPLE_COLUMNS}
            offsets = np.append(0, ends[first:after] - begin)
            yield self._collate(rows["user_id"].numpy(), offsets, columns)
            first = after
