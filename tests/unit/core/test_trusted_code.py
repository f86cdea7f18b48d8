"""The record of code that this user trained with: found again, lost by nobody, and nothing once others can write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.core.errors import StorageError, UsageError
from tackboard.core.trusted_code import check_trusted, trust_code

CODE, SHA256 = Path("/home/ann/mine.py"), "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the entries lie, once there is one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tackboard" / "trusted-code"


def test_what_was_recorded_is_trusted_and_nothing_else(folder: Path) -> None:
    trust_code(CODE, SHA256)
    trust_code(CODE, SHA256)
    check_trusted(CODE, SHA256)
    assert len(list(folder.iterdir())) == 1
    for path, sha256 in ((CODE, "cd" * 32), (Path("/home/ann/other.py"), SHA256), (CODE, "None"), (CODE, "")):
        with pytest.raises(UsageError, match="no record of training"):
            check_trusted(path, sha256)


def test_modes_do_not_follow_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        trust_code(CODE, SHA256)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (folder.parent, folder, *folder.iterdir())]
    assert modes == [0o700, 0o700, 0o600]
    check_trusted(CODE, SHA256)


def test_home_is_used_without_xdg_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    trust_code(CODE, SHA256)
    check_trusted(CODE, SHA256)
    assert len(list((tmp_path / ".local" / "state" / "tackboard" / "trusted-code").glob("*.json"))) == 1


def _entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def _linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.parent.chmod(0o770),
        lambda folder: folder.chmod(0o702),
        lambda folder: _entry(folder).chmod(0o620),
        _linked,
    ],
    ids=["parent", "folder", "entry", "link"],
)
def test_what_others_could_have_written_is_refused(
    spoil: Callable[[Path], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trust_code(CODE, SHA256)
    spoil(folder)
    with pytest.raises(StorageError, match="others may write") as refused:
        check_trusted(CODE, SHA256)
    assert "--code" in refused.value.fix


def test_what_somebody_else_owns_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trust_code(CODE, SHA256)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="owned by somebody else"):
        check_trusted(CODE, SHA256)
    trust_code(CODE, SHA256)
    assert "warning: no record of /home/ann/mine.py could be kept" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100])
def test_a_damaged_entry_is_no_trust(content: bytes, folder: Path) -> None:
    trust_code(CODE, SHA256)
    _entry(folder).write_bytes(content)
    with pytest.raises(UsageError, match="no record of training"):
        check_trusted(CODE, SHA256)
    trust_code(CODE, SHA256)
    check_trusted(CODE, SHA256)


def test_trainings_at_the_same_time_lose_no_entry(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tackboard.core.trusted_code import trust_code\n"
        "for number in range(40): trust_code(Path(f'/{sys.argv[1]}/{number}.py'), 'ab' * 32)"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(number)]) for number in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    for process in range(3):
        for number in range(40):
            check_trusted(Path(f"/{process}/{number}.py"), SHA256)
    assert len(list(folder.iterdir())) == 120
