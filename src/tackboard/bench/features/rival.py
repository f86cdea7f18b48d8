"""Runs one contender of `tackboard bench features` in a process of its own, and what hand-written rivals share.

    python -m tackboard.bench.features.rival polars batch FOLDER REPEATS

In: the name of a contender, a part (`batch`, `online` or `unprepared`), a folder with the tables of `data.py`,
and how often to measure. Out: the contender's values as Arrow files in that folder, and one JSON object with the times
as the last line. Decided: all contenders, ours too, run this way, several times in turn, so that none inherits
another's caches or threads. Online, `prepared` contenders may do anything beforehand that depends on an item alone; the
others are given the attributes of the items with the request, already looked up. A request's history holds what was
received before it, so nobody filters it again. What is timed begins with tables in the contender's own form in memory
and ends with its own columns in memory; reading files, and turning values into Arrow for the comparison, is not timed.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.bench.features.data import DAY_MS, read_world, write_table
from tackboard.core.hashing import mix64, row_ids, string_id

CONTENDERS = {
    "tackboard": ("tackboard.bench.features.ours", ""),
    "polars": ("tackboard.bench.features.polars", ""),
    "pandas": ("tackboard.bench.features.pandas", ""),
    "numpy": ("tackboard.bench.features.numpy", ""),
    "feast_python": ("tackboard.bench.features.feast", "python"),
    "feast_pandas": ("tackboard.bench.features.feast", "pandas"),
    "feast_store": ("tackboard.bench.features.feast", "store"),
}
"""Module and variant of each contender."""
WARM_UP = 60
"""Requests before times are taken, at most as many as are measured."""

# ---- what is the same in every hand-written version ----

AGE_LIMITS = (18, 25, 35, 45, 55, 65)
PRICE_LIMITS = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
ITEM_AGE_LIMITS = (0.0, 1.0, 7.0, 30.0, 90.0, 365.0)
DEVICES = {"phone": 1, "tablet": 2, "desktop": 3}
WEEK_MS = 7 * DAY_MS
DECAY = -math.log(2.0) / (3 * DAY_MS)


@functools.cache
def known_string_id(text: str) -> int:
    """A string's id. Rivals remember what they made of a string, from one request to the next."""
    return string_id(text)


@functools.cache
def known_brand_id(text: str) -> int:
    """The id of a brand, however it is spelt."""
    return string_id(unicodedata.normalize("NFC", text.strip().lower()))


@functools.cache
def known_sale(text: str) -> bool:
    """Whether a title speaks of a sale."""
    return "sale" in text.lower()


def cross_ids(one: Any, other: Any) -> NDArray[np.int64]:
    """The ids of two columns of ids together; either may be a single id."""
    mixed = mix64(np.atleast_1d(np.asarray(one, dtype=np.int64)), 0)
    other = np.atleast_1d(np.asarray(other, dtype=np.int64)).view(np.uint64)
    return mix64(mixed ^ other, 0).view(np.int64)


def item_buckets(ids: Any) -> NDArray[np.int64]:
    """Each id's bucket of 100,000."""
    return row_ids(np.asarray(ids, dtype=np.int64), 1, 100_000, 0)[:, 0]


def squares(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """The squared length of each vector [n, width], in 64 bits."""
    return dots(vectors, vectors)


def dots(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
    """The scalar products of vectors [n, width] in 64 bits; `left` may be one vector [1, width]."""
    wide, other = left.astype(np.float64), right.astype(np.float64)
    return other @ wide[0] if len(wide) == 1 else np.einsum("ij,ij->i", wide, other)


def cosines(product: Any, left_square: Any, right_square: Any) -> NDArray[np.float64]:
    """Cosines from scalar products and squared lengths; 0 where a vector has no length."""
    length = np.sqrt(left_square * right_square)
    return np.divide(product, length, out=np.zeros_like(product), where=length > 0)


# ---- the program ----


def measure_batch(compute: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """CPU and wall seconds of each run, after one that is not counted."""
    compute()
    cpu, wall = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        compute()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    return {"cpu_seconds": cpu, "wall_seconds": wall}


def measure_online(compute: Callable[[int], Any], num_requests: int, repeats: int) -> dict[str, Any]:
    """Wall and CPU µs of each request, the different ones taking turns, after a warm-up that is not counted."""
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
        contender = module.Batch(world)
        tables = contender.to_arrow(contender.compute())
        times = measure_batch(contender.compute, repeats)
    else:
        contender = module.Online(world, *([variant] if variant else []), prepared=part == "online")
        num_requests = world.requests.num_rows
        answers = [contender.to_arrow(contender.compute(number)) for number in range(num_requests)]
        tables = tuple(pa.concat_tables([answer[kind] for answer in answers]) for kind in (0, 1))
        times = measure_online(contender.compute, num_requests, repeats)
    for kind, table in zip(("requests", "rows"), tables, strict=True):
        write_table(folder / f"{name}_{part}_{kind}.arrow", table)
    return times


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))  # noqa: T201
