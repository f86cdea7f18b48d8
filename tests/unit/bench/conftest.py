"""Runs contenders of the features bench over one small world, each in a process of its own, as the bench does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.bench import features
from tackboard.bench.features_compare import differences
from tackboard.bench.features_data import QUICK, batch_world, online_world, read_table

PARTS = {"batch": "batch", "online": "online", "unprepared": "online"}


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tables of both parts, and our own values."""
    folder = tmp_path_factory.mktemp("features-bench")
    batch_world(QUICK, 3).write(folder / "batch")
    online_world(QUICK, 3).write(folder / "online")
    return folder


def compute(name: str, part: str, worlds: Path, python: Path) -> list[Path]:
    """The two files that a contender writes."""
    folder = worlds / PARTS[part]
    paths = [folder / f"{name}_{part}_{kind}.arrow" for kind in ("requests", "rows")]
    if not all(path.exists() for path in paths):
        done = subprocess.run(
            [str(python), "-m", "tackboard.bench.features_rival", name, part, str(folder), "1"],
            env={**os.environ, "PYTHONPATH": str(features.ROOT / "src"), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return paths


@pytest.fixture
def same_as_ours(worlds: Path) -> Callable[[str, str], None]:
    """A function of (rival, part) that fails where the rival's values are not ours."""
    if not features.RIVALS_PYTHON.exists():
        pytest.skip("the rivals are not installed: make rivals")

    def check(name: str, part: str) -> None:
        ours = compute(features.OURS, part, worlds, Path(sys.executable))
        theirs = compute(name, part, worlds, features.RIVALS_PYTHON)
        for one, other in zip(ours, theirs, strict=True):
            table = read_table(one)
            assert table.num_rows > 0
            assert differences(table, read_table(other)) == []

    return check
