"""This rival is Hugging Face `datasets` over its memory-mapped Arrow file, with one row per segment.

Two variants are measured:

    torch   torch format: reads the rows of a step by a shuffled index; each column is a list of tensors, which
            torch.cat joins
    arrow   Arrow format: reads contiguous blocks of rows in a shuffled order; the rows of a window of blocks are
            shuffled and gathered in NumPy

Three other ways were tried and not used. Their speeds, in rows per CPU-second before any collate:

    54,000    `to_iterable_dataset().shuffle(buffer_size)` in Arrow format
    319,000   a shuffled index in Arrow format
    19,000    a shuffled index in NumPy format
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rivals import loader_batches
from rivals.loader_batches import Window, window_of_examples
from tackboard.batch import SequenceBatch
from tackboard.bench.loader.data import EXAMPLE_COLUMNS

BLOCK_ROWS = 1_024
"""Number of rows in a block, which is read at once. As with our buckets, a window mixes many blocks."""


class Contender(loader_batches.Contender):
    """Reads segments from the memory-mapped file."""

    def __init__(self, folder: Path, variant: str) -> None:
        import datasets

        super().__init__(folder, variant)
        self._dataset: Any = datasets.Dataset.from_file(str(folder / "examples.arrow")).with_format(variant)
        parts = self._dataset.with_format("arrow").iter(BLOCK_ROWS) if variant == "torch" else ()
        # The number of events of each row is read once. It decides which rows make a batch.
        self._lengths = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(pc.list_value_length(part["item"]).to_numpy() for part in parts)]
        )

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        return super().epoch(number, num_workers) if self.variant == "arrow" else self._torch(number)

    def windows(self, epoch: int, generator: np.random.Generator) -> Iterator[Window]:
        """Yields the rows of a window of blocks, shuffled together."""
        total = len(self._dataset)
        order = generator.permutation(-(-total // BLOCK_ROWS)) * BLOCK_ROWS
        blocks = max(1, self.setting.window_rows(total) // BLOCK_ROWS)
        for place in range(0, len(order), blocks):
            firsts = np.sort(order[place : place + blocks]).tolist()
            parts = [self._dataset[first : min(first + BLOCK_ROWS, total)] for first in firsts]
            yield window_of_examples(pa.concat_tables(parts), generator)

    def _torch(self, number: int) -> Iterator[SequenceBatch]:
        import torch

        order = np.random.default_rng([self.setting.seed, number]).permutation(len(self._lengths))
        ends = np.cumsum(self._lengths[order])
        first = 0
        while first < len(order):
            begin = int(ends[first - 1]) if first else 0
            after = int(np.searchsorted(ends, begin + self.setting.tokens_per_step, side="right"))
            rows = self._dataset[order[first:after].tolist()]
            columns = {name: torch.cat(list(rows[name])).numpy() for name in EXAMPLE_COLUMNS}
            offsets = np.append(0, ends[first:after] - begin)
            yield self.collate(rows["user_id"].numpy(), offsets, columns)
            first = after
