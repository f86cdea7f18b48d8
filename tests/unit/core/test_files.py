"""Durable writes: whatever point a writer dies at, readers find the old content or all of the new."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.core import files
from tackboard.core.errors import CorruptFileError, StorageError, UsageError


class KilledError(BaseException):
    """Stands for a kill: nothing between here and the caller may handle it."""


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The points that writers passed."""
    passed: list[str] = []
    monkeypatch.setattr(files, "observer", passed.append)
    return passed


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the writer die at a named point."""

    def set_point(point: str) -> None:
        def observe(reached: str) -> None:
            if reached == point:
                raise KilledError

        monkeypatch.setattr(files, "observer", observe)

    return set_point


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, points: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        points.append("fsync of " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".tmp")[0])

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text_atomic(tmp_path / "state", "new")
    assert points[1:] == [
        "state:after-write",
        "fsync of .state",
        "state:after-fsync",
        "state:after-rename",
        f"fsync of {tmp_path.name}",
    ]


@pytest.mark.parametrize("point", ["before-write", "after-write", "after-fsync", "after-rename"])
def test_a_killed_write_leaves_old_or_new(tmp_path: Path, die_at: Callable[[str], None], point: str) -> None:
    path = tmp_path / "state"
    files.write_bytes_atomic(path, b"old")
    die_at(f"state:{point}")
    with pytest.raises(KilledError):
        files.write_bytes_atomic(path, b"new and longer")
    assert path.read_bytes() == (b"new and longer" if point == "after-rename" else b"old")
    files.observer = None
    files.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize(("point", "expected"), [("before-rename", "one"), ("after-rename", "two")])
def test_a_killed_symlink_change_leaves_old_or_new(
    tmp_path: Path, die_at: Callable[[str], None], point: str, expected: str
) -> None:
    link = tmp_path / "latest"
    files.replace_symlink(link, "one")
    die_at(f"latest:{point}")
    with pytest.raises(KilledError):
        files.replace_symlink(link, "two")
    assert os.readlink(link) == expected
    files.observer = None
    files.replace_symlink(link, "three")  # a leftover of the killed one is no obstacle
    assert os.readlink(link) == "three"


def test_new_directory_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "result"
    with files.new_directory(final) as temporary:
        (temporary / "part").write_text("x")
        assert not final.exists()
    assert (final / "part").read_text() == "x"
    assert os.listdir(final.parent) == ["result"]


def test_new_directory_vanishes_when_its_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.new_directory(tmp_path / "result") as temporary:
        (temporary / "part").write_text("x")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_new_directory_refuses_an_existing_one_and_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    with pytest.raises(UsageError, match="exists already"), files.new_directory(tmp_path / "result"):
        pytest.fail("the block must not run")
    assert (tmp_path / "result").is_dir()


def leave_behind(folder: Path, name: str) -> None:
    """A folder that a killed writer of `name` was about to fill, with its lock file."""
    script = (
        "import os, sys; from pathlib import Path; from tackboard.core.files import new_directory\n"
        "with new_directory(Path(sys.argv[1])) as temporary:\n"
        "    (temporary / 'part').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder / name)]).returncode == -9


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    leave_behind(tmp_path, "b")
    (tmp_path / ".a.tmp-1a2b").write_text("")
    (tmp_path / ".c.tmp-1a2b").symlink_to("nowhere")
    (tmp_path / ".d.gone-1a2b").mkdir()
    (tmp_path / "kept").write_text("")
    with files.staging_directory(tmp_path / "alive") as alive:
        (alive / "part").write_text("x")
        assert files.remove_leftovers(tmp_path) == 4
        assert (alive / "part").read_text() == "x"
        assert sorted(os.listdir(tmp_path)) == sorted([alive.name, f"{alive.name}.lock", "kept"])
    assert os.listdir(tmp_path) == ["kept"]


def test_a_folder_without_a_lock_is_left_for_a_day(tmp_path: Path) -> None:
    folder = tmp_path / ".a.tmp-12345"  # As versions before locks made it; its writer may still be alive.
    folder.mkdir()
    assert files.remove_leftovers(tmp_path) == 0
    two_days_ago = time.time() - 2 * 86_400
    os.utime(folder, (two_days_ago, two_days_ago))
    assert files.remove_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path) == []


def test_leftovers_can_be_limited_to_one_name(tmp_path: Path) -> None:
    leave_behind(tmp_path, "a")
    leave_behind(tmp_path, "b")
    with files.new_directory(tmp_path / "a"):
        pass
    left = sorted(name.partition(".tmp-")[0] for name in os.listdir(tmp_path))
    assert left == [".b", ".b", "a"]


def test_a_small_write_survives_a_cleaner_that_takes_its_temporary_file(tmp_path: Path) -> None:
    seen = []

    def clean(point: str) -> None:
        if point.endswith((":after-fsync", ":before-rename")) and len(seen) < 3:
            seen.append(point)
            assert files.remove_leftovers(tmp_path) == 1

    files.observer = clean
    try:
        files.write_text_atomic(tmp_path / "state", "new")
        files.replace_symlink(tmp_path / "latest", "state")
    finally:
        files.observer = None
    assert len(seen) == 3
    assert (tmp_path / "latest").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["latest", "state"]


def test_of_two_writers_of_one_folder_the_second_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"), files.new_directory(tmp_path / "a") as late:
        (late / "part").write_text("late")
        with files.new_directory(tmp_path / "a") as early:
            (early / "part").write_text("early")
    assert (tmp_path / "a" / "part").read_text() == "early"
    assert os.listdir(tmp_path) == ["a"]


def test_a_removed_directory_is_gone_under_its_name_before_its_files_go(tmp_path: Path, points: list[str]) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "part").write_text("x")

    def look(point: str) -> None:
        points.append(point)
        assert (folder / "part").exists() == (point == "old:before-removal")

    files.observer = look
    files.remove_directory(folder)
    assert points == ["old:before-removal", "old:during-removal"]
    assert os.listdir(tmp_path) == []


def test_faults_of_the_machine_are_told_from_bugs() -> None:
    full = files.storage_error(OSError(errno.ENOSPC, "no space", "/disk/file"), "writing a checkpoint")
    assert full is not None
    assert str(full).splitlines()[0] == "writing a checkpoint: No space left on device: /disk/file"
    assert "make room" in full.fix
    assert files.storage_error(OSError(errno.EBADF, "bad descriptor")) is None


def test_sha256_reads_past_one_chunk(tmp_path: Path) -> None:
    data = bytes(range(256)) * (files.CHUNK_BYTES // 256) + b"tail"
    (tmp_path / "data").write_bytes(data)
    assert files.sha256_file(tmp_path / "data") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe"])
def test_unreadable_json_names_the_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"broken\.json"):
        files.read_json(path)
    with pytest.raises(CorruptFileError):
        files.read_json(tmp_path)  # a folder where a file should be


def test_an_error_while_writing_what_was_asked_for_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out x: File exists"), files.writing("--out", Path("x")):
        raise FileExistsError(errno.EEXIST, "File exists", "x")
    with pytest.raises(StorageError, match="--out x: Not a directory: x/y"), files.writing("--out", Path("x")):
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y")
    with files.writing("--out", tmp_path / "y"):
        (tmp_path / "y").write_text("")
