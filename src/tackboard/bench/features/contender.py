"""Runs one contender (Tackboard or a rival) of `tackboard bench features` in a separate process.

    python -m tackboard.bench.features.contender polars batch FOLDER REPEATS

The arguments are the name of a contender, a part (`batch`, `online` or `unprepared`), a folder with the tables of
`data.py`, and the number of measurements. The process writes the contender's values as Arrow files into the folder. The
last line of its output is one JSON object with the times. Each contender takes several turns. Decided: every turn,
including Tackboard's, is a process of its own, so that no contender inherits the caches or threads of another
contender.

In the part `online`, features that depend only on an item may be computed before the timing begins. In the part
`unprepared`, each request carries the attributes of its items, already looked up. The history of an online request
holds only events that were received before the request, so no contender filters the history again. Timing begins when
the tables are in memory in the contender's format, and ends when the features are in memory in this format. Reading
files and converting features to Arrow for the comparison are not timed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tackboard.bench.features.data import read_world, write_table

CONTENDERS = {
    "tackboard": ("tackboard.bench.features.ours", ""),
    "polars": ("rivals.features_polars", ""),
    "pandas": ("rivals.features_pandas", ""),
    "numpy": ("rivals.features_numpy", ""),
    "feast_python": ("rivals.features_feast", "python"),
    "feast_pandas": ("rivals.features_feast", "pandas"),
    "feast_store": ("rivals.features_feast", "store"),
}
"""Contender → (module, variant). The package `rivals` is in benchmarks/rivals."""
WARM_UP = 60
"""Number of requests before timing begins. The warm-up never has more requests than the measurement."""


def measure_batch(compute: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Returns CPU and wall seconds of each run. The first run is a warm-up and is not counted."""
    compute()
    cpu, wall = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        compute()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    return {"cpu_seconds": cpu, "wall_seconds": wall}


def measure_online(compute: Callable[[int], Any], num_requests: int, repeats: int) -> dict[str, Any]:
    """Returns wall and CPU µs of each of `repeats` requests, after a warm-up. Cycles through the different requests."""
    for number in range(min(WARM_UP, repeats)):
        compute(number % num_requests)
    wall, cpu = [], []
    for number in range(repeats):
        cpu_start, start = time.process_time(), time.perf_counter()
        compute(number % num_requests)
        wall.append((time.perf_counter() - start) * 1e6)
        cpu.append((time.process_time() - cpu_start) * 1e6)
    return {"wall_us": wall, "cpu_us": cpu}


def run(name: str, part: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Measures a contender over the tables in `folder` and writes its values there."""
    module_name, variant = CONTENDERS[name]
    module = importlib.import_module(module_name)
    world = read_world(folder)
    if part == "batch":
        contender = module.BatchContender(world)
        tables = contender.to_arrow(contender.compute())
        times = measure_batch(contender.compute, repeats)
    else:
        contender = module.OnlineContender(world, *([variant] if variant else []), prepared=part == "online")
        num_requests = world.requests.num_rows
        answers = [contender.to_arrow(contender.compute(number)) for number in range(num_requests)]
        tables = tuple(pa.concat_tables([answer[kind] for answer in answers]) for kind in (0, 1))
        times = measure_online(contender.compute, num_requests, repeats)
    for kind, table in zip(("requests", "rows"), tables, strict=True):
        write_table(folder / f"{name}_{part}_{kind}.arrow", table)
    return times


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))  # noqa: T201
