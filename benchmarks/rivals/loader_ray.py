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
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rivals import loader_batches
from rivals.loader_batches import Window, window_of_examples

NUM_CPUS = 2
STORE_BYTES = 1 << 30


class Contender(loader_batches.Contender):
    """Segments from Ray's object store."""

    def __init__(self, folder: Path, variant: str) -> None:
        import ray
        import ray.data

        super().__init__(folder, variant)
        self._path = str(folder / "examples.parquet")
        self._window = self.setting.window_rows(pq.read_metadata(self._path).num_rows)
        ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=STORE_BYTES,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False

    def windows(self, epoch: int, generator: np.random.Generator) -> Iterator[Window]:
        """A window's rows at a time, or of `local` a step's rows out of Ray's own shuffle buffer."""
        import ray.data

        options: dict[str, Any] = {"batch_size": self._window}
        if self.variant == "local":
            rows = max(1, self.setting.tokens_per_step // self.setting.max_length)
            options = {"batch_size": rows, "local_shuffle_buffer_size": self._window, "local_shuffle_seed": epoch}
        for table in ray.data.read_parquet(self._path).iter_batches(batch_format="pyarrow", **options):
            yield window_of_examples(table, generator)
