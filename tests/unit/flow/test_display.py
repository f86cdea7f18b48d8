"""What a pipeline shows: one line per stage in a log, a live line on a terminal."""

import re

import pytest

from tackboard.flow.display import Display


def run_two_stages(*, live: bool) -> None:
    with Display(2, live=live) as display:
        display.begin("data")
        display.update(5, 10, "half [way]")
        display.end("10 events")
        display.begin("train")
        display.end("loss 1.0")


def test_a_log_gets_one_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    run_two_stages(live=False)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\[1/2\] data +0\.\d s  10 events", lines[0])
    assert re.fullmatch(r"\[2/2\] train +0\.\d s  loss 1\.0", lines[1])
    assert "\r" not in output.err
    assert output.out == ""


def test_a_terminal_gets_a_live_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run_two_stages(live=True)
    output = capsys.readouterr()
    assert "[1/2] data" in output.err and "10 events" in output.err
    assert output.out == ""


def test_outside_a_terminal_nothing_is_live(capsys: pytest.CaptureFixture[str]) -> None:
    assert Display(1).live is False
