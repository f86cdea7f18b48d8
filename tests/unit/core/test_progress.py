"""Progress: plain lines in a log, never a carriage return there."""

from __future__ import annotations

import sys
import time

import pytest

from tackboard.core import progress
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
