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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError, 2),
        (errors.ConfigError, 2),
        (errors.DataError, 3),
        (errors.CorruptFileError, 3),
        (errors.DivergedError, 4),
    ],
)
def test_our_errors_print_their_lines_and_exit_with_their_code(
    fail_with: Callable[[BaseException], Any], error: type[errors.TackboardError], code: int
) -> None:
    answer = fail_with(error("what was given", allowed="what is allowed", fix="what to do"))
    assert answer.code == code
    assert answer.out == ""
    assert answer.err == "error: what was given\n  what is allowed\n  what to do\n"


def test_a_stop_that_was_asked_for_is_not_called_an_error(fail_with: Callable[[BaseException], Any]) -> None:
    answer = fail_with(errors.Preempted("stopped at step 3", fix="go on with --resume auto"))
    assert answer.code == 75
    assert answer.err == "stopped at step 3\n  go on with --resume auto\n"


def test_a_bug_says_that_it_is_one_in_two_lines(fail_with: Callable[[BaseException], Any]) -> None:
    answer = fail_with(ValueError("something\nover\nlines"))
    assert answer.code == 1
    assert answer.err.splitlines() == [
        "error: a bug in tackboard: ValueError: something over lines",
        "  run again with `tackboard --debug …` and report the traceback",
    ]


def test_an_interrupt_is_no_error_of_ours(fail_with: Callable[[BaseException], Any]) -> None:
    answer = fail_with(KeyboardInterrupt())
    assert (answer.code, answer.err) == (130, "interrupted\n")


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


def test_another_exit_stays(fail_with: Callable[[BaseException], Any]) -> None:
    assert fail_with(SystemExit(7)).code == 7
