"""What hand-written rivals share, and the program that measures one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tackboard.bench.features.data import read_table
from tackboard.bench.features.rival import (
    cosines,
    cross_ids,
    dots,
    item_buckets,
    known_brand_id,
    known_sale,
    known_string_id,
    measure_batch,
    measure_online,
    squares,
)
from tackboard.bench.features.run import ROOT
from tackboard.core.hashing import mix64, row_ids, string_id


def test_ids_are_those_of_the_project() -> None:
    assert known_string_id("shoes") == string_id("shoes")
    assert known_brand_id(" CAFE\u0301\t") == string_id("caf\u00e9")
    ids = np.array([1, -5, 2**62], dtype=np.int64)
    assert item_buckets(ids).tolist() == row_ids(ids, 1, 100_000, 0)[:, 0].tolist()
    expected = mix64(mix64(ids, 0) ^ np.uint64(7), 0).view(np.int64)
    assert cross_ids(ids, 7).tolist() == expected.tolist()
    assert cross_ids(ids[1], 7).tolist() == expected[1:2].tolist()


def test_a_sale_is_found_whatever_its_case() -> None:
    assert known_sale("Lamp on SALE") and not known_sale("Lamp")


def test_cosines() -> None:
    left = np.array([[1.0, 0.0], [0.0, 0.0], [3.0, 4.0]], dtype=np.float32)
    right = np.array([[2.0, 0.0], [1.0, 1.0], [-3.0, -4.0]], dtype=np.float32)
    assert cosines(dots(left, right), squares(left), squares(right)).tolist() == [1.0, 0.0, -1.0]
    assert dots(right[:1], right).tolist() == [4.0, 2.0, -6.0]


def test_measuring_counts_only_after_a_warm_up() -> None:
    calls: list[int] = []
    times = measure_online(calls.append, 3, 4)
    assert calls == [0, 1, 2, 0, 0, 1, 2, 0]
    assert len(times["wall_us"]) == len(times["cpu_us"]) == 4
    runs: list[None] = []
    assert len(measure_batch(lambda: runs.append(None), 3)["cpu_seconds"]) == 3
    assert len(runs) == 4


def test_the_program_writes_values_and_prints_times(worlds: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tackboard.bench.features.rival", "tackboard", "batch", str(worlds / "batch"), "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["wall_seconds"]) == 2
    assert read_table(worlds / "batch" / "tackboard_batch_requests.arrow").num_columns == 18
    assert read_table(worlds / "batch" / "tackboard_batch_rows.arrow").num_columns == 22
