"""Locks: one holder at a time, free as soon as the holder is dead, and a lease where the kernel cannot tell."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tackboard.core import locks
from tackboard.core.locks import silence_to_wait_for, try_lock, wait_for_lock

HOLDER = """
import sys, time
from pathlib import Path
from tackboard.core.locks import try_lock
with try_lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    """A process that takes the lock and holds it until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=20)


def age(path: Path, seconds: float) -> None:
    """Makes a lock file look as if its holder had been silent that long."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def is_free(path: Path) -> bool:
    with try_lock(path) as held:
        return held


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path) as held:
        assert held
        with try_lock(path) as again:
            assert not again, "a second holder in the same process"
        assert path.exists()
    assert not path.exists()
    assert is_free(path)


def test_a_lock_of_another_process_is_busy_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = start_holder(path)
    assert not is_free(path)
    age(path, 3600)
    assert not is_free(path), "the kernel's lock counts, however silent its holder is"
    end(process)
    assert is_free(path)


def test_a_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = start_holder(path)
    process.kill()
    end(process)
    assert path.exists()
    assert is_free(path)


def test_a_looker_does_not_release_a_lock_of_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path):
        assert not is_free(path)  # Had the file been opened and closed, the kernel would have dropped the lock.
        script = f"from tests.unit.core.test_locks import *; sys.exit(is_free(Path({str(path)!r})))"
        root = Path(__file__).parents[3]
        assert subprocess.run([sys.executable, "-c", script], cwd=root).returncode == 0


def test_a_lock_that_is_not_there_cannot_be_taken_without_making_it(tmp_path: Path) -> None:
    with try_lock(tmp_path / "lock", create=False) as held:
        assert not held
    assert os.listdir(tmp_path) == []


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = start_holder(path)
    with wait_for_lock(path, timeout_s=0.1) as held:
        assert not held
    process.kill()
    with wait_for_lock(path, timeout_s=20) as held:
        assert held
    end(process)


def test_a_file_of_another_host_counts_as_held_until_it_has_been_silent(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"another host")
    assert 50 < silence_to_wait_for(path) <= locks.LEASE_S
    assert not is_free(path)
    age(path, locks.LEASE_S + 5)
    assert silence_to_wait_for(path) == 0
    assert is_free(path)


def test_a_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.01)
    path = tmp_path / "lock"
    with try_lock(path):
        age(path, 3600)
        deadline = time.monotonic() + 10
        while time.time() - path.stat().st_mtime > 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    def refuse(*_arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_lease_decides(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with try_lock(path) as held:
        assert held
    assert not path.exists()
    path.write_bytes(locks._host())  # As a killed holder on this host leaves it.
    assert not is_free(path)
    age(path, locks.LEASE_S + 5)
    assert is_free(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_silent_file_that_somebody_else_renewed_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"silent")
    descriptor = os.open(path, os.O_RDWR)
    path.unlink()
    path.write_bytes(b"renewed")
    assert locks._remove_silent(descriptor, path) is False
    os.close(descriptor)
    assert path.read_bytes() == b"renewed"
    assert os.listdir(tmp_path) == ["lock"]


def test_a_fault_of_the_disk_names_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="lock") as caught, try_lock(tmp_path / "lock"):
        pytest.fail("the block must not run")
    assert caught.value.filename == str(tmp_path / "lock")
