"""Runs one contender (our loader or a rival) of `tackboard bench loader` in a separate process.

    python -m tackboard.bench.loader.contender arrow events FOLDER speed,check

The arguments are a contender, its variant, the folder that `data.prepare` wrote, and tasks. The last line of the output
is one JSON object of figures. A contender is a module with a class `Contender(folder, variant)`. The method
`epoch(number, num_workers)` of the class yields the batches of an epoch as `SequenceBatch`. The tasks are:

    speed      measures CPU seconds of all processes for complete epochs, after a warm-up that is not counted
    check      writes NAME_VARIANT_check.npz with a digest of every segment, and with all tensors of some batches
    memory     runs one epoch; the caller measures the memory, see `ask` in core/processes.py
    workers2   measures wall-clock seconds of one epoch with two workers, including the time to start the workers
    workers0   measures wall-clock seconds of one epoch without workers

Decided: work before the first epoch (opening files, our pass over the dataset for the index, starting Ray) is reported
separately, because it is done once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.processes import own_cpu_seconds, pss_bytes

MODULES = {
    "tackboard": "tackboard.bench.loader.ours",
    "arrow": "rivals.loader_arrow",
    "hugging_face": "rivals.loader_hugging_face",
    "ray": "rivals.loader_ray",
}
LIBRARIES = {"hugging_face": ("pandas", "datasets"), "ray": ("pandas", "ray.data"), "arrow": ("pandas",)}
"""Libraries that a contender needs in addition to torch and Arrow. They are loaded before idle memory is measured."""
WARM_UP_SECONDS = 1.0
"""The warm-up reads the first epoch until it has used this much CPU time. The warm-up is not counted."""
LEAST_SECONDS = 0.8
"""Complete epochs are measured until they have used this much CPU time, but at most MOST_EPOCHS epochs."""
MOST_EPOCHS = 6
KEPT_BATCHES = 3


def main(arguments: list[str]) -> None:
    """Runs one contender; see the docstring of the module."""
    name, variant, folder, tasks = arguments
    import pyarrow as pa
    import torch

    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    for library in LIBRARIES.get(name, ()):
        importlib.import_module(library)
    module = importlib.import_module(MODULES[name])
    idle, before = pss_bytes(os.getpid()), own_cpu_seconds()
    contender = module.Contender(Path(folder), variant)
    figures = {"idle_bytes": idle, "setup_cpu_seconds": own_cpu_seconds() - before}
    for task in tasks.split(","):
        if task == "check":
            figures |= write_check(contender.epoch(0), Path(folder) / f"{name}_{variant}_check.npz")
        else:
            figures |= TASKS[task](contender)
    print(json.dumps(figures), flush=True)  # noqa: T201


def measure_speed(contender: Any) -> dict[str, Any]:
    """Measures CPU and wall seconds of complete epochs."""
    start = own_cpu_seconds()
    for _ in contender.epoch(0):
        if own_cpu_seconds() - start > WARM_UP_SECONDS:
            break
    counts = {"num_examples": 0, "num_tokens": 0, "num_steps": 0}
    epochs, wall_start, start = 0, time.perf_counter(), own_cpu_seconds()
    while epochs < MOST_EPOCHS and (own_cpu_seconds() - start < LEAST_SECONDS or not epochs):
        epochs += 1
        _count(contender.epoch(epochs), counts)
    return counts | {
        "num_epochs": epochs, "cpu_seconds": own_cpu_seconds() - start, "wall_seconds": time.perf_counter() - wall_start
    }  # fmt: skip


def measure_once(contender: Any, num_workers: int = 0) -> dict[str, Any]:
    """Measures CPU and wall seconds of one epoch, without a warm-up."""
    counts = {"num_examples": 0, "num_tokens": 0, "num_steps": 0}
    wall_start, start = time.perf_counter(), own_cpu_seconds()
    _count(contender.epoch(0, num_workers), counts)
    return counts | {"cpu_seconds": own_cpu_seconds() - start, "wall_seconds": time.perf_counter() - wall_start}


TASKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "speed": measure_speed,
    "memory": measure_once,
    "workers0": measure_once,
    "workers2": partial(measure_once, num_workers=2),
}


def _count(batches: Iterator[Any], counts: dict[str, int]) -> None:
    for batch in batches:
        counts["num_examples"] += batch.num_rows
        counts["num_tokens"] += batch.num_events
        counts["num_steps"] += 1


def write_check(batches: Iterator[Any], path: Path) -> dict[str, Any]:
    """Writes the sorted digests of all segments of an epoch, and all tensors of the first batches."""
    from tackboard.bench.loader.check import batch_arrays, digests_of_batch

    digests: list[NDArray[np.uint64]] = []
    kept: dict[str, NDArray[Any]] = {}
    most = 0
    for number, batch in enumerate(batches):
        digests.append(digests_of_batch(batch))
        most = max(most, batch.num_events)
        if number < KEPT_BATCHES:
            arrays = batch_arrays(batch) | {"digests": digests[-1]}
            kept |= {f"{number}/{field}": array for field, array in arrays.items()}
    np.savez(path, digests=np.sort(np.concatenate(digests)), **kept)  # type: ignore[arg-type]
    return {"most_tokens": most}


if __name__ == "__main__":
    main(sys.argv[1:])
