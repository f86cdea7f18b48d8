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
    failed = runs.train(at=["optimizer.safetensors:before-write", 3], action="ENOSPC")
    first, intact, advice = failed.error_lines
    assert first.startswith("error: the checkpoint of step 6 could not be written: No space left on device")
    assert intact.strip() == "the checkpoints before it are intact"
    (run,) = runs.all
    assert advice.endswith(f"go on with: --resume {run.relative_to(runs.nursery.folder)}")
    assert (run / "STATUS").read_text().startswith("failed: the checkpoint of step 6")
    assert load_checkpoint(run / "checkpoints" / "latest").state["step"] == 3
    assert runs.train().code == 0
    assert runs.digest() == reference.digest


def test_a_file_that_the_kernel_will_not_let_grow(runs: Runs, reference: Reference) -> None:
    # A real refused write inside safetensors, which knows no OSError.
    failed = runs.train(max_file_bytes=2048)
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
    recipe = f"{Path(__file__).parent / 'small_recipe.py'}:recipe"
    command = [sys.executable, "-m", "tackboard", "train", recipe, "--resume", "auto"]
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
