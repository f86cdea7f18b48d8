"""Runs contenders of the features and the loader bench over little data, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.bench import features
from tackboard.bench.features_compare import differences
from tackboard.bench.features_data import QUICK, batch_world, online_world, read_table
from tackboard.bench.loader import Entry, Runner
from tackboard.bench.loader_check import Reference
from tackboard.bench.loader_data import POSITIVE, Setting, prepare, write_made_up

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


@pytest.fixture(scope="session")
def loader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rivals of the loader read, of a small made-up dataset."""
    root = tmp_path_factory.mktemp("loader-bench")
    snapshot = write_made_up(root, "small", num_events=6_000, num_items=300, mean_length=40, seed=3)
    setting = Setting(dataset=str(snapshot), positive_actions=POSITIVE, max_length=32, tokens_per_step=512)
    prepare(setting, root / "rivals")
    return root / "rivals"


@pytest.fixture
def loader_differences(loader_folder: Path) -> Callable[[str, str], list[str]]:
    """A function of (module, variant): what differs from our batches in those of a rival, run as the bench does."""
    if not features.RIVALS_PYTHON.exists():
        pytest.skip("the rivals are not installed: make rivals")

    def differences(module: str, variant: str) -> list[str]:
        runner = Runner(loader_folder, features.RIVALS_PYTHON)
        found = runner.run(Entry(module, variant, ""), "check")
        assert "failed" not in found, found
        assert 0 < found["most_tokens"] <= 512
        return Reference(Setting.read(loader_folder)).differences(loader_folder / f"{module}_{variant}_check.npz")

    return differences
