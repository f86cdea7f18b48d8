"""The program that measures one contender."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tackboard.bench import rivals
from tackboard.bench.features.contender import measure_batch, measure_online
from tackboard.bench.features.data import read_table


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
        [sys.executable, "-m", "tackboard.bench.features.contender", "tackboard", "batch", str(worlds / "batch"), "2"],
        env={**os.environ, **rivals.environment()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["wall_seconds"]) == 2
    assert read_table(worlds / "batch" / "tackboard_batch_requests.arrow").num_columns == 18
    assert read_table(worlds / "batch" / "tackboard_batch_rows.arrow").num_columns == 22
