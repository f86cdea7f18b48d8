"""Several processes write one checkpoint, and one of them is killed at any named point: nothing complete is lost.

`make test` takes some points, `make test-slow` all points of all three processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.store import CheckpointStore, load_checkpoint
from tackboard.checkpoint.stored_rows import decode, merge
from tackboard.core.manifest import verify_manifest
from tackboard.models.changed_rows import whole_tensor

HERE = Path(__file__).parent
KILLED = -9
QUICK = [
    (1, "tables-r00001.safetensors:after-write"),
    (2, "r00002:before-seal"),
    (2, "MANIFEST.json:before-write"),
    (1, "r00001:after-seal"),
    (0, "optimizer-r00000.safetensors:before-write"),
    (0, "tables-r00001.safetensors:before-move"),
    (0, "optimizer-r00001.safetensors:after-move"),
    (0, "optimizer-r00002.safetensors:after-fsync"),
    (0, "MANIFEST.json:after-rename"),
    (0, "step-00000002:before-rename"),
    (0, "step-00000002:after-rename"),
    (0, "latest:after-rename"),
    (0, ".step-00000002.parts-first:before-removal"),
    (0, ".step-00000002.parts-first:during-removal"),
]


class Driver:
    """The process that forks the ranks."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / "parts_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._answer() == {"ready": True}

    def save(self, folder: Path, step: int, token: str, **order: Any) -> tuple[list[int], list[list[str]]]:
        """Three ranks save a step; returns their exit codes and the points that they passed."""
        assert self.process.stdin is not None
        line = json.dumps({"folder": str(folder), "step": step, "token": token, **order})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["codes"], answer["points"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def check(path: Path) -> None:
    """The checkpoint holds all rows of all three processes."""
    checkpoint = load_checkpoint(path)
    step, described = checkpoint.state["step"], checkpoint.state["fresh_rows"]
    rows = torch.arange(12.0) * 10 + step
    for group, name, expected in (("tables", "t.weight", rows), ("optimizer", "adagrad.t", rows + 1)):
        stored = merge([decode(checkpoint.tensors[f"{group}-r0000{rank}"], described) for rank in range(3)])[name]
        whole = whole_tensor(stored, path)
        assert torch.equal(whole if whole.dim() == 1 else whole[:, 1], expected)
    assert checkpoint.tensors["dense"]["bias"].tolist() == [step] * 3


def kill_and_go_on(driver: Driver, folder: Path, rank: int, point: str, occurrence: int = 1) -> None:
    for step in (0, 1):
        assert driver.save(folder, step, f"before{step}")[0] == [0, 0, 0]
    at = [rank, point, occurrence]
    codes, _ = driver.save(folder, 2, "first", at=at)
    assert codes[rank] == KILLED, f"{point}: {codes}"
    for path in folder.glob("step-*"):
        verify_manifest(path, "checkpoint")
    found = CheckpointStore(folder).find_latest()
    assert found is not None and found.state["step"] in (1, 2)
    check(found.path)
    check(folder / "latest")
    assert driver.save(folder, 2, "second")[0] == [0, 0, 0]
    check(folder / "step-00000002")
    check(folder / "latest")
    CheckpointStore(folder).clean()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["latest", "step-00000001", "step-00000002"], f"{point} left {left}"


@pytest.mark.parametrize(("rank", "point"), QUICK)
def test_a_killed_rank_loses_nothing_that_was_complete(driver: Driver, tmp_path: Path, rank: int, point: str) -> None:
    kill_and_go_on(driver, tmp_path, rank, point)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_every_point_of_every_rank(driver: Driver, tmp_path: Path, rank: int) -> None:
    for step in (0, 1):
        driver.save(tmp_path / "points", step, f"before{step}")
    codes, points = driver.save(tmp_path / "points", 2, "first")
    assert codes == [0, 0, 0]
    passed = Counter(points[rank])
    assert {point for number, point in QUICK if number == rank} <= set(passed)
    for point, times in sorted(passed.items()):
        kill_and_go_on(driver, tmp_path / point.replace("/", "_"), rank, point, (times + 1) // 2)
