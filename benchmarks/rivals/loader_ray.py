"""This rival is Ray Data on one machine: a row per segment, `iter_batches` in Arrow format, vectorised collation.

There are two variants. On 2 million events an epoch took 1.0 CPU seconds with `window` and 1.2 with `local`, so the
bench measures `window`:

    window   reads batches as large as our window, shuffles and gathers them in NumPy, and cuts them into steps
    local    lets Ray shuffle in a buffer as large as our window; small batches go through the same code as windows

`iter_torch_batches` is not used, because it does not support lists of unequal length. The CPU time and memory of Ray's
scheduler, object store and workers are included in the results.
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
    """Reads segments from Ray's object store."""

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
        """Yields the rows of a window. The variant `local` yields about a step of rows from Ray's shuffle buffer."""
        import ray.data

        options: dict[str, Any] = {"batch_size": self._window}
        if self.variant == "local":
            rows = max(1, self.setting.tokens_per_step // self.setting.max_length)
            options = {"batch_size": rows, "local_shuffle_buffer_size": self._window, "local_shuffle_seed": epoch}
        for table in ray.data.read_parquet(self._path).iter_batches(batch_format="pyarrow", **options):
            yield window_of_examples(table, generator)
