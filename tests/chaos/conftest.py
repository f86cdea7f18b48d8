"""A tiny dataset, a process that starts trials on it, and what an uninterrupted run ends in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tackboard.checkpoint.store import load_checkpoint
from tackboard.core.manifest import verify_manifest
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORLD = WorldConfig(num_users=60, num_items=80, num_topics=5, median_events=12.0, max_events=30)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one process ended: its exit code (negative: the signal that ended it), its time and what it printed."""

    code: int
    seconds: float
    log: str

    @property
    def error_lines(self) -> list[str]:
        """The lines of the message, from `error:` on, or from `stopped by` where the stop was asked for."""
        lines = self.log.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(("error:", "stopped by"))]
        return lines[starts[-1] :] if starts else []


class Runs:
    """The runs of one trial: a folder that trainings are started in, killed and taken up again."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.name = name
        self.folder = nursery.folder / name

    def train(self, workers: int = 0, settings: Sequence[str] = (), **order: Any) -> Outcome:
        """`tackboard train … --resume auto` with so many loader workers, disturbed as `order` says (see driver.py)."""
        recipe = f"{HERE / 'small_recipe.py'}:recipe"
        options = [word for setting in (f"data.num_workers={workers}", *settings) for word in ("--set", setting)]
        return self.nursery.run(["train", recipe, "--runs", self.name, "--resume", "auto", *options], **order)

    @property
    def all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("[0-9]*_small_*"))

    @property
    def done(self) -> list[Path]:
        """Those that came to their end."""
        return [run for run in self.all if (run / "STATUS").is_file() and (run / "STATUS").read_text() == "done\n"]

    @property
    def finished(self) -> Path:
        """The one run that came to its end."""
        assert len(self.done) == 1, f"{len(self.done)} of {len(self.all)} runs are done"
        return self.done[0]

    def digest(self) -> str:
        """SHA-256 over every parameter, every optimiser sum and the counters of the finished run's last checkpoint.

        Those of the one that was judged best, too.
        """
        return " ".join(digest_of(self.finished / "checkpoints" / name) for name in ("latest", "best"))

    def metrics(self) -> list[dict[str, Any]]:
        """Metric lines of the finished run, without the figures that depend on the clock."""
        lines = [json.loads(line) for line in (self.finished / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in ("time", "tokens_per_s")} for line in lines]

    def check_readable(self) -> int:
        """Every checkpoint that bears its final name verifies to the last byte, `latest` included; how many did."""
        checked = 0
        for run in self.all:
            latest = run / "checkpoints" / "latest"
            assert latest.exists() or not latest.is_symlink(), f"{latest} points at nothing"
            if latest.exists():
                load_checkpoint(latest)
            for path in (run / "checkpoints").glob("step-*"):
                verify_manifest(path, "checkpoint")
                checked += 1
        return checked

    def leftovers(self) -> list[Path]:
        """Temporary files and folders of writers that are gone."""
        return sorted([*self.folder.rglob(".*.tmp-*"), *self.folder.rglob(".*.gone-*")])


class Nursery:
    """The driver process, and the workspace its trials run in."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        """`within` is a command that starts the driver in surroundings of its own."""
        self.folder = folder
        self.num_trials = 0
        self._num_runs = 0
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-W", "error", str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._answer() == {"ready": True}

    def runs(self) -> Runs:
        """A fresh folder of runs."""
        self._num_runs += 1
        return Runs(self, f"runs{self._num_runs}")

    def run(self, arguments: list[str], **order: Any) -> Outcome:
        """One `tackboard ARGUMENTS` in a process of its own."""
        self.num_trials += 1
        log = self.folder / f"log{self.num_trials}.txt"
        log.touch()
        answer = self._order({"arguments": arguments, "folder": str(self.folder), "log": str(log), **order})
        return Outcome(answer["code"], answer["seconds"], log.read_text())

    def reap(self) -> int:
        """Waits for the workers of killed trainers; how many would not end."""
        left: int = self._order({"reap": True})["left"]
        return left

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        left = self.reap()
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        assert left == 0, f"{left} processes outlived their trial"

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@dataclasses.dataclass(frozen=True)
class Reference:
    """The uninterrupted run: what it ends in, what it logs, how long it takes, which points its writer passes."""

    digest: str
    metrics: list[dict[str, Any]]
    seconds: float
    points: list[str]


def digest_of(checkpoint: Path) -> str:
    loaded = load_checkpoint(checkpoint)
    whole = hashlib.sha256()
    for group in sorted(loaded.tensors):
        for name, tensor in sorted(loaded.tensors[group].items()):
            whole.update(f"{group}/{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole.update(tensor.numpy().tobytes())
    names = ("step", "data_step", "num_tokens", "last_loss", "guard", "validation")
    counters = {key: loaded.state[key] for key in names}
    whole.update(json.dumps(counters, sort_keys=True).encode())
    return whole.hexdigest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and "chaos" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))  # They try every point; a slow machine needs minutes.


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch:
        # Several buckets, so that twelve steps cross windows: what a resumed run must find again.
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 100)
        write_world(WORLD, folder / "datasets", "small")
    nursery = Nursery(folder)
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A driver whose folder holds `disk`, 4 MB that nobody else sees, a dataset and a log."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "disk").mkdir()
    write_world(WORLD, folder / "datasets", "small")
    lines = [f"{number % 50},{number % 70},{1_700_000_000 + number}" for number in range(2_000)]
    (folder / "log.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    mount = 'mount -t tmpfs -o size=4m small "$1" && shift && exec "$@"'
    nursery = Nursery(folder, ["unshare", "-m", "bash", "-c", mount, "bash", str(folder / "disk")])
    yield nursery
    nursery.close()


@pytest.fixture
def runs(nursery: Nursery) -> Runs:
    return nursery.runs()


@pytest.fixture(scope="session")
def reference(nursery: Nursery) -> Reference:
    runs = nursery.runs()
    points = nursery.folder / "points.txt"
    # Twice: the first trial also pays for what the file system has not seen yet, and leaves an index of the data.
    first = runs.train()
    assert first.code == 0, first.log
    again = nursery.runs()
    outcome = again.train(points=str(points))
    assert outcome.code == 0, outcome.log
    assert again.digest() == runs.digest()
    return Reference(runs.digest(), runs.metrics(), outcome.seconds, points.read_text().splitlines())
