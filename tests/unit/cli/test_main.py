"""The program: every error is at most three lines and its own exit code; nothing but --debug shows a traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tackboard as package
from tackboard.cli import main
from tackboard.core import errors

Program = Callable[..., Any]


@pytest.fixture
def fail_with(tackboard: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Any]:
    """Runs a program whose command raises."""

    def run(error: BaseException) -> Any:
        def app(**options: Any) -> None:
            assert options["standalone_mode"] is False
            raise error

        monkeypatch.setattr(main, "app", app)
        return tackboard()

    return run


LINES = {"allowed": "what is allowed", "fix": "what to do"}
BUG = "error: a bug in tackboard: ValueError: something over lines\n  run again with `tackboard --debug …` and report"


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        *(
            (kind("what was given", **LINES), code, "error: what was given\n  what is allowed\n  what to do\n")
            for kind, code in (
                (errors.UsageError, 2),
                (errors.ConfigError, 2),
                (errors.DataError, 3),
                (errors.CorruptFileError, 3),
                (errors.DivergedError, 4),
            )
        ),
        (
            errors.Preempted("stopped at step 3", fix="use --resume auto"),
            75,
            "stopped at step 3\n  use --resume auto\n",
        ),
        (ValueError("something\nover\nlines"), 1, f"{BUG} the traceback\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(7), 7, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_command_decides_its_lines_and_its_code(
    fail_with: Callable[[BaseException], Any], error: BaseException, code: int, printed: str
) -> None:
    assert fail_with(error) == (code, "", printed)


def test_a_full_disk_is_the_machines(fail_with: Callable[[BaseException], Any]) -> None:
    answer = fail_with(OSError(errno.ENOSPC, "no space", "/disk/x"))
    assert answer.code == 2
    assert answer.err.startswith("error: No space left on device: /disk/x\n")
    assert len(answer.err.splitlines()) <= 3
    assert fail_with(OSError(errno.EBADF, "bad descriptor")).code == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evaluate", "x", "--max-users", "many"], "--max-users"),
        (["verify", "a", "b"], "unexpected extra argument"),
    ],
)
def test_mistakes_on_the_command_line(tackboard: Program, arguments: list[str], expected: str) -> None:
    answer = tackboard(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert expected in answer.err
    assert answer.err.startswith("error: ")
    assert len(answer.err.splitlines()) == 2
    assert "--help" in answer.err.splitlines()[1]


def test_debug_shows_the_traceback_and_keeps_the_code(tackboard: Program, tmp_path: Path) -> None:
    plain = tackboard("verify", tmp_path / "absent")
    debug = tackboard("--debug", "verify", tmp_path / "absent")
    assert plain.code == debug.code == 2
    assert "Traceback" not in plain.err
    assert debug.err.startswith("Traceback")
    assert debug.err.endswith(plain.err)


def test_version_needs_no_command(tackboard: Program) -> None:
    assert tackboard("--version") == (0, f"tackboard {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["data"], ["bench"]])
def test_without_a_command_the_help_is_shown(tackboard: Program, arguments: list[str]) -> None:
    answer = tackboard(*arguments)
    assert answer.code == 2
    assert answer.out.startswith("Usage: ")
    assert answer.err == ""


def test_help_names_every_command(tackboard: Program) -> None:
    answer = tackboard("--help")
    assert answer.code == 0
    names = ["init", "data", "train", "evaluate", "export", "serve", "score", "verify", "doctor", "demo", "bench"]
    assert [name for name in names if f"\n  {name} " not in answer.out] == []


def test_a_reader_that_goes_away_is_no_error(tiny_dataset: Path) -> None:
    program = [sys.executable, "-m", "tackboard", "data", "stats", str(tiny_dataset)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        # Nothing can be written to a pipe that nobody holds.
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 0
