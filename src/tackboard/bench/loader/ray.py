"""Rival: Ray Data on this machine, one row per segment; `iter_batches` in Arrow format, then the vectorised collate.

Variants, of which the faster, the first, is the contender (2 million events, CPU seconds of an epoch: 1.0 and 1.2):

    window   batches as large as a window of ours, shuffled and gathered in NumPy, then cut into steps
    local    `local_shuffle_buffer_size` of a window; each small batch is flattened and goes on to the same collate

`iter_torch_batches` is not used: it has no lists of unequal length. Ray's scheduler, object store and workers count as
its processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.batch import SequenceBatch
from tackboard.bench.loader.arrow import window_of_examples
from tackboard.bench.loader.collate import Collate, Steps
from tackboard.bench.loader.data import Setting

NUM_CPUS = 2
STORE_BYTES = 1 << 30


class Contender:
    """See `rival`."""

    def __init__(self, folder: Path, variant: str) -> None:
        import ray
        import ray.data

        self._setting = Setting.read(folder)
        self._collate = Collate(folder)
        self._variant = variant
        self._path = str(folder / "examples.parquet")
        self._num_rows = pq.read_metadata(self._path).num_rows
        ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=STORE_BYTES,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False

    def epoch(self, number: int, num_workers: int = 0) -> Iterator[SequenceBatch]:
        """The batches of an epoch."""
        del num_workers
        generator = np.random.default_rng([self._setting.seed, number])
        steps = Steps(self._collate, self._setting.tokens_per_step)
        held: pa.Table | None = None
        for table in self._tables(number):
            if held is not None:
                yield from steps.add(*window_of_examples(held, generator), last=False)
            held = table
        if held is not None:
            yield from steps.add(*window_of_examples(held, generator), last=True)

    def _tables(self, epoch: int) -> Iterator[pa.Table]:
        import ray.data

        window = self._setting.window_rows(self._num_rows)
        dataset = ray.data.read_parquet(self._path)
        if self._variant == "window":
            return iter(dataset.iter_batches(batch_size=window, batch_format="pyarrow"))
        rows = max(1, self._setting.tokens_per_step // self._setting.max_length)
        return iter(
            dataset.iter_batches(
                batch_size=rows,
                batch_format="pyarrow",
                local_shuffle_buffer_size=window,
                local_shuffle_seed=epoch,
            )
        )
