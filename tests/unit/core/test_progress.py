"""Progress: plain lines in a log, never a carriage return there."""

from __future__ import annotations

import sys
import time

import pytest

from tackboard.core import progress
from tackboard.core.errors import UsageError
from tackboard.core.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; its one entry is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_one_line_at_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", total=2000, unit="rows") as bar:
        for _ in range(1500):
            bar.advance(1, note="loss 0.5")
        clock[0] += 2.5
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "reading: 1,500/2,000 rows, loss 0.5, 2.5 s\n"


def test_a_long_stage_speaks_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", unit="rows") as bar:
        for _ in range(100):
            bar.advance()
            clock[0] += progress.LOG_EVERY_S / 10
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "reading: 11 rows, 15.0 s"
    assert "\r" not in "".join(lines)


def test_an_interrupted_stage_says_so(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Progress("reading"):
        raise ZeroDivisionError
    assert "(interrupted)" in capsys.readouterr().err


def test_quiet_is_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", quiet=True) as bar:
        clock[0] += 100
        bar.advance()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("reading", total=3, unit="rows") as bar:
        bar.advance(3, note="done soon")
    err = capsys.readouterr().err
    assert "reading" in err
    assert "3/3" in err


@pytest.fixture
def second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is number 2 of a run, and the second of its host."""
    monkeypatch.setattr(progress, "_speaker", progress._speaker)
    progress.speak_as(2, is_first_on_host=False)


def test_only_the_first_process_of_a_run_speaks(second_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    progress.say("warning: something")
    with Progress("reading", total=2) as bar:
        bar.advance(2)
    assert capsys.readouterr().err == ""
    progress.complain(ValueError(), "error: broken")
    assert capsys.readouterr().err == "[process 2] error: broken\n"


def test_an_error_of_all_processes_is_printed_once_on_a_host(
    second_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UsageError("they differ")
    error.is_common = True
    progress.complain(error, "error: they differ")
    assert capsys.readouterr().err == ""
    progress.speak_as(2, is_first_on_host=True)
    progress.complain(error, "error: they differ")
    assert capsys.readouterr().err == "[process 2] error: they differ\n"
