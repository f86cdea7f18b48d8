"""Writers in different PID namespaces, as in two containers that share a folder, leave each other's work alone.

There a process cannot see whether another one lives: /proc shows its own namespace only, and both may have the same
PID. Each test holds one writer at a point in the middle, lets another run, and then lets the first go on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tackboard.checkpoint.store import load_checkpoint
from tackboard.core.locks import try_lock, wait_for_lock
from tackboard.core.manifest import verify_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.events.dataset import open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_S = 60.0


@functools.cache
def unshare() -> tuple[str, ...]:
    """The words before a command that runs it as the first process of a PID namespace; empty where that may not be."""
    for rights in ((), ("--user", "--map-root-user")):
        words = ("unshare", *rights, "--pid", "--fork", "--mount-proc", "--kill-child")
        try:
            if subprocess.run([*words, "true"], capture_output=True, timeout=10).returncode == 0:
                return words
        except (OSError, subprocess.TimeoutExpired):
            return ()
    return ()


class Writer:
    """One `tackboard` in a namespace of its own, in `folder`."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, folder: Path, name: str, arguments: list[str], point: str = "") -> None:
        self.stopped, self.go = folder / f"{name}-stopped", folder / f"{name}-go"
        self.log = folder / f"{name}.log"
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        writer = [sys.executable, str(HERE / "namespace_writer.py"), point, str(self.stopped), str(self.go)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*unshare(), *writer, *arguments], cwd=folder, env=environment, stdout=log, stderr=log
            )
        self.started.append(self.process)

    def wait_at_its_point(self) -> None:
        """Returns when the writer stands there."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.stopped.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def end(self) -> int:
        """Lets the writer go on and returns its exit code."""
        self.go.touch()
        return self.process.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def no_writer_stays() -> Iterator[None]:
    """Ends the writers of a test that failed half-way."""
    yield
    for process in Writer.started:
        process.kill()
        process.wait(PATIENCE_S)
    Writer.started.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not unshare():
        pytest.skip("no PID namespace can be made here: unshare is missing or not allowed")
    rows = "".join(f"u{n % 7},i{n % 11},{1_700_000_000 + n}\n" for n in range(200))
    (tmp_path / "log.csv").write_text("user,item,time\n" + rows)
    return tmp_path


def init(recipe: str) -> list[str]:
    columns = ["--user", "user", "--item", "item", "--time", "time"]
    return ["init", "--from", "log.csv", *columns, "--name", "shop", "--recipe", recipe]


@pytest.mark.parametrize(
    "point", ["layout.json:after-rename", pytest.param("events.parquet:after-fsync", marks=pytest.mark.slow)]
)
def test_an_import_leaves_the_staging_folder_of_another_namespace_alone(folder: Path, point: str) -> None:
    first = Writer(folder, "first", init("a.py"), point)
    first.wait_at_its_point()
    second = Writer(folder, "second", init("b.py"))
    assert second.end() == 0, second.log.read_text()
    assert first.end() == 0, first.log.read_text()
    snapshots = [path for path in (folder / "datasets" / "shop").iterdir() if path.is_dir() and not path.is_symlink()]
    for snapshot in snapshots:
        assert open_dataset(snapshot).read_events().num_rows == 200
    leftovers = [path.name for path in (folder / "datasets" / "shop").iterdir() if path.name.startswith(".")]
    assert leftovers == []


def train() -> list[str]:
    return ["train", f"{HERE / 'small_recipe.py'}:recipe", "--resume", "auto"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["tables.safetensors:after-write", "state.json:after-rename"])
def test_a_second_trainer_takes_nothing_from_one_in_another_namespace(folder: Path, point: str) -> None:
    write_world(WorldConfig(num_users=60, num_items=80, num_topics=5), folder / "datasets", "small")
    first = Writer(folder, "first", train(), point)
    first.wait_at_its_point()
    (path,) = (folder / "runs").glob("[0-9]*_*")  # `latest` waits for the first checkpoint.
    run = RunDirectory.open(path)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "torn')  # As if the first trainer were in the middle of a line.
    second = Writer(folder, "second", train())
    assert second.end() == 2, second.log.read_text()
    assert "another process" in second.log.read_text()
    is_torn = (run.path / "metrics.jsonl").read_text().endswith('"torn')
    assert is_torn, "the second trainer cleaned a run it does not hold"
    assert first.end() == 0, first.log.read_text()
    checkpoints = sorted((run.path / "checkpoints").glob("step-*"))
    assert checkpoints
    for path in checkpoints:
        files = {entry["name"] for entry in verify_manifest(path, "checkpoint")["files"]}
        assert files >= {"dense.safetensors", "tables.safetensors", "optimizer.safetensors", "state.json"}
        load_checkpoint(path)


@pytest.mark.slow
def test_imports_at_once_all_end_well_and_leave_whole_snapshots(folder: Path) -> None:
    for round_number in range(4):
        writers = [Writer(folder, f"w{round_number}-{n}", init(f"r{round_number}-{n}.py")) for n in range(4)]
        assert [writer.end() for writer in writers] == [0] * 4, [writer.log.read_text() for writer in writers]
    for snapshot in (folder / "datasets" / "shop").glob("2*"):
        assert open_dataset(snapshot).read_events().num_rows == 200


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A folder on a file system of that kind; skips where it cannot be mounted."""
    place = folder / "place"
    for name in ("place", "lower", "upper", "work"):
        (folder / name).mkdir()
    layers = f"lowerdir={folder / 'lower'},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    options = {"tmpfs": [], "overlay": ["-o", layers]}[kind]
    if subprocess.run(["mount", "-t", kind, *options, kind, str(place)], capture_output=True).returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_lock_holds_across_namespaces_on(folder: Path, kind: str) -> None:
    script = (
        "import sys; from pathlib import Path; from tackboard.core.locks import try_lock\n"
        "with try_lock(Path(sys.argv[1])) as held: print(held, flush=True); sys.stdin.read()"
    )
    with mounted(kind, folder) as place:
        lock = place / "lock"
        holder = subprocess.Popen(
            [*unshare(), sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        Writer.started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        with try_lock(lock) as held:
            assert not held
        holder.kill()
        holder.communicate(timeout=PATIENCE_S)
        with wait_for_lock(lock, PATIENCE_S) as held:
            assert held
