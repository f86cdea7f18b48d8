"""A disk that is full or failing stops the run with one clear message; what was complete stays complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.checkpoint.store import load_checkpoint

if TYPE_CHECKING:
    from conftest import Nursery, Outcome, Reference, Runs
else:
    Nursery = Outcome = Reference = Runs = Any

RECIPE = f"{Path(__file__).parent / 'small_recipe.py'}:recipe"
WORDS = {"ENOSPC": "No space left on device", "EIO": "Input/output error", "EFBIG": "File too large"}
QUICK = [
    ("tables.safetensors:before-write", "ENOSPC"),
    ("MANIFEST.json:after-write", "EIO"),
    ("latest:before-rename", "ENOSPC"),
    ("config.json:after-write", "ENOSPC"),
]


def check_message(outcome: Outcome, fault: str) -> None:
    assert outcome.code == 2, outcome.log
    assert "Traceback" not in outcome.log
    assert 1 <= len(outcome.error_lines) <= 3, outcome.log
    assert WORDS[fault] in outcome.error_lines[0]


def fail_and_go_on(nursery: Nursery, reference: Reference, point: str, fault: str) -> None:
    """One failing move, then a second start on a healthy disk."""
    runs = nursery.runs()
    failed = runs.train(at=[point, (Counter(reference.points)[point] + 1) // 2], action=fault)
    check_message(failed, fault)
    runs.check_readable()
    resumed = runs.train()
    assert resumed.code == 0, resumed.log
    assert runs.digest() == reference.digest
    assert runs.metrics() == reference.metrics
    assert runs.leftovers() == []


@pytest.mark.parametrize(("point", "fault"), QUICK)
def test_a_failing_write_is_told_and_leaves_the_old_checkpoint(
    nursery: Nursery, reference: Reference, point: str, fault: str
) -> None:
    fail_and_go_on(nursery, reference, point, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
def test_a_failure_at_every_point_of_the_writer(nursery: Nursery, reference: Reference, fault: str) -> None:
    for point in sorted(set(reference.points)):
        fail_and_go_on(nursery, reference, point, fault)


def test_a_checkpoint_that_fails_says_how_to_go_on(runs: Runs, reference: Reference) -> None:
    # The third is that of step 4, where the run is judged: after those of steps 0 and 3.
    failed = runs.train(at=["optimizer.safetensors:before-write", 3], action="ENOSPC")
    first, intact, advice = failed.error_lines
    assert first.startswith("error: the checkpoint of step 4 could not be written: No space left on device")
    assert intact.strip() == "the checkpoints before it are intact"
    (run,) = runs.all
    assert advice.endswith(f"continue with: --resume {run.relative_to(runs.nursery.folder)}")
    assert (run / "STATUS").read_text().startswith("failed: the checkpoint of step 4")
    assert load_checkpoint(run / "checkpoints" / "latest").state["step"] == 3
    assert runs.train().code == 0
    assert runs.digest() == reference.digest


def test_a_file_that_the_kernel_will_not_let_grow(runs: Runs, reference: Reference) -> None:
    # A real refused write inside safetensors, which knows no OSError.
    failed = runs.train(max_file_bytes=3072)
    check_message(failed, "EFBIG")
    assert "the checkpoint of step 0" in failed.error_lines[0] and ".safetensors" in failed.error_lines[0]
    runs.check_readable()
    assert runs.train().code == 0
    assert runs.digest() == reference.digest
    assert runs.leftovers() == []


def can_mount() -> bool:
    """Whether this process may mount a small disk of its own."""
    if not shutil.which("unshare") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
def test_a_disk_that_is_really_full(nursery: Nursery, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tackboard", "train", RECIPE, "--resume", "auto"]
    command += ["--set", f"data.dataset={nursery.folder / 'datasets' / 'small'}", "--set", "training.steps=3000"]
    # Another program fills the disk while the run is under way; what is on it is copied out before it vanishes.
    script = """
        mount -t tmpfs -o size=2m full "$1" && cd "$1" && shift
        (until [ -e runs/latest/checkpoints/latest ]; do sleep .1; done; exec head -c 9M /dev/zero > other) 2> errors &
        "$@"; code=$?; wait; cp -a runs "$OLDPWD"; exit $code
    """
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "bash", str(disk), *command],
        cwd=kept,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    error = [line for line in lines if line.startswith("error:")]
    assert len(error) == 1 and "No space left on device" in error[0], done.stderr
    assert len(lines) - lines.index(error[0]) <= 3
    (run,) = (kept / "runs").glob("*_small_*")
    load_checkpoint(run / "checkpoints" / "latest")


FEATURES = "tackboard.recipes.demo_features"
COLUMNS = ["--user", "user", "--item", "item", "--time", "time"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "init": (["init", "log.csv", *COLUMNS, "--out", "disk/made", "--recipe", "new.py"], []),
    "init recipe": (["init", "log.csv", *COLUMNS, "--out", "made", "--recipe", "disk/new.py"], []),
    "synth": (["data", "synth", "--out", "disk/made", "--set", "num_users=20"], []),
    "label": (["data", "label", "disk/small", "--label", "save=1h"], ["datasets/small"]),
    "retain": (["data", "retain", "disk/small", "--days", "30"], ["datasets/small"]),
    "forget": (["data", "forget", "--user", "7", "--data", "disk/small"], ["datasets/small"]),
    "forget in a store": (["data", "forget", "--user", "7", "--store", "disk/store.db"], ["store.db"]),
    "stats": (["data", "stats", "datasets/small", "--out", "disk/page.html"], []),
    "backfill": (["features", "backfill", FEATURES, "--data", "disk/small"], ["datasets/small"]),
    "docs": (["features", "docs", FEATURES, "--out", "disk/page.html"], []),
    "train": (["train", RECIPE, "--runs", "disk/runs", "--set", "training.validate_every=0"], []),
    "resume": (["train", RECIPE, "--runs", "disk/begun", "--resume", "auto"], ["begun"]),
    "evaluate": (["evaluate", "disk/done"], ["done"]),
    "export": (["export", "done", "--out", "disk/bundle"], []),
    "create": (["sequences", "create", "disk/store.db"], []),
    "append": (["sequences", "append", "disk/store.db", "log.csv"], ["store.db"]),
    "correct": (["sequences", "correct", "disk/store.db", "--data", "datasets/small"], ["store.db"]),
    "port file": (["serve", "bundle", "--port", "0", "--port-file", "disk/port"], []),
}
"""Commands that write to the disk, and what lies there before."""
FREE_BYTES = (0, 8_192, 40_960, 131_072)


@pytest.fixture(scope="module")
def trained_disk(small_disk: Nursery) -> Nursery:
    """`small_disk` with a run that is done, a run that is not, a bundle and a store beside its disk."""
    folder = small_disk.folder
    for arguments in (
        ["train", RECIPE, "--runs", "runs"],
        ["train", RECIPE, "--runs", "begun", "--set", "training.steps=12"],
        ["export", "runs/latest", "--out", "bundle"],
        ["sequences", "create", "store.db"],
    ):
        made = small_disk.run(arguments)
        assert made.code == 0, made.log
    (folder / "runs" / "latest").resolve().rename(folder / "done")
    begun = (folder / "begun" / "latest").resolve()
    (begun / "STATUS").write_text("running\n")
    shutil.rmtree((begun / "checkpoints" / "latest").resolve())
    return small_disk


def check_full_disk(small_disk: Nursery, name: str, free_bytes: int) -> bool:
    """Whether the disk was full; then the command must say so, and where."""
    arguments, copied = COMMANDS[name]
    shutil.rmtree(small_disk.folder / "made", ignore_errors=True)
    (small_disk.folder / "new.py").unlink(missing_ok=True)
    order: dict[str, Any] = {"disk": str(small_disk.folder / "disk"), "copied": copied, "free_bytes": free_bytes}
    if arguments[0] == "serve":
        order |= {"after_s": 20.0, "signal": "SIGTERM"}
    done = small_disk.run(arguments, **order)
    if done.code == 0:
        return False
    assert done.code == 2 and "Traceback" not in done.log and 1 <= len(done.error_lines) <= 3, done.log
    message = "\n".join(done.error_lines)
    # SQLite has words of its own for it, and a run that cannot fit is refused before it begins.
    assert any(word in message for word in (WORDS["ENOSPC"], "disk is full", "disk I/O error", "B free")), message
    assert "disk/" in message, message
    return True


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
@pytest.mark.parametrize("name", ["init recipe", "create"])
def test_a_full_disk_is_told_with_its_path(small_disk: Nursery, name: str) -> None:
    assert check_full_disk(small_disk, name, 0)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_a_full_disk_with_its_path(trained_disk: Nursery, name: str) -> None:
    assert check_full_disk(trained_disk, name, 0)
    for free_bytes in FREE_BYTES[1:] if COMMANDS[name][0][0] != "serve" else ():
        check_full_disk(trained_disk, name, free_bytes)
