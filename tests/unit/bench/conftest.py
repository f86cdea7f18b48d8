"""Runs contenders of the features and the loader bench over little data, each in a process of its own.

For the quality bench: files in the format of MovieLens, made up.
"""

import dataclasses
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench import rivals
from tackboard.bench.features.data import QUICK, batch_world, online_world, read_table
from tackboard.bench.features.run import differences
from tackboard.bench.loader.check import Reference
from tackboard.bench.loader.data import POSITIVE, Setting, prepare, write_made_up
from tackboard.bench.loader.run import Entry, Runner
from tackboard.bench.quality.data import BENCHES
from tackboard.events.dataset import write_dataset
from tackboard.events.public import listing
from tackboard.events.public.publisher import PublishedCounts, canonical_events

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
            [str(python), "-m", "tackboard.bench.features.contender", name, part, str(folder), "1"],
            env={**os.environ, **rivals.environment()},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return paths


@pytest.fixture
def same_as_ours(worlds: Path) -> Callable[[str, str], None]:
    """A function of (rival, part) that fails where the rival's values are not ours."""
    if not rivals.PYTHON.exists():
        pytest.skip("the rivals are not installed: make rivals")

    def check(name: str, part: str) -> None:
        ours = compute("tackboard", part, worlds, Path(sys.executable))
        theirs = compute(name, part, worlds, rivals.PYTHON)
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
    if not rivals.PYTHON.exists():
        pytest.skip("the rivals are not installed: make rivals")

    def differences(module: str, variant: str) -> list[str]:
        runner = Runner(loader_folder, rivals.PYTHON)
        found = runner.run(Entry(module, variant, ""), "check")
        assert "failed" not in found, found
        assert 0 < found["most_tokens"] <= 512
        return Reference(Setting.read(loader_folder)).differences(loader_folder / f"{module}_{variant}_check.npz")

    return differences


def movielens_files(num_users: int = 24, num_items: int = 30, num_events: int = 12) -> dict[str, str]:
    """Ratings in which each film is followed by the next, three of them in each second; five films nobody rated."""
    ratings = [
        "::".join(map(str, (user, (user * 5 + place) % num_items + 1, place % 5 + 1, 978_000_000 + user + place // 3)))
        for user in range(1, num_users + 1)
        for place in range(num_events)
    ]
    films = [f"{film}::Film {film} (1990)::Drama" for film in range(1, num_items + 6)]
    people = [f"{user}::F::25::{user % 3}::0000{user % 10}" for user in range(1, num_users + 1)]
    files = {"ratings.dat": ratings, "movies.dat": films, "users.dat": people}
    return {f"ml-1m/{name}": "\n".join(lines) + "\n" for name, lines in files.items()}


@pytest.fixture
def fake_ml_1m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ml-1m/ml-1m.zip, of made-up ratings, which passes for the publisher's."""
    folder = tmp_path / "downloads" / "ml-1m"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "ml-1m.zip", "w") as archive:
        for name, text in movielens_files().items():
            archive.writestr(name, text)
    counts = PublishedCounts(users=24, items=30, events=288)
    monkeypatch.setitem(listing.DATASETS, "ml-1m", dataclasses.replace(listing.DATASETS["ml-1m"], counts=counts))
    small = dataclasses.replace(BENCHES["ml-1m"], max_length=12, quick_stride=2)
    monkeypatch.setitem(BENCHES, "ml-1m", small)
    return folder.parent


@pytest.fixture
def made_up_ratings() -> Callable[[Path], None]:
    """A function that writes a prepared dataset: 40 users of 20 events whose actions are drawn, on 30 items."""

    def write(path: Path, actions: Sequence[str] = tuple(f"rating_{stars}" for stars in range(1, 6))) -> None:
        random = np.random.default_rng(11)
        users, items = np.repeat(np.arange(1, 41), 20), random.integers(1, 31, 800)
        chosen = pa.array([actions[code] for code in random.integers(0, len(actions), 800)])
        events = canonical_events(users, items, np.arange(800) * 60_000, action=chosen)
        source = {"kind": "made up", "last_tied_share": 0.0}
        write_dataset(path.parent.parent / "made-up", "ratings", events, source=source).rename(path)

    return write
