"""Commands of a pipeline: their answers are read, their failures passed on, and none outlives the pipeline."""

import resource
from pathlib import Path

import pytest

from tackboard.flow.command import Command, StageError, run_command

pytestmark = pytest.mark.usefixtures("fake_commands")


def test_a_command_gives_its_answer_and_what_it_used(tmp_path: Path) -> None:
    calls = []
    finished = run_command("evaluate", ["evaluate", "RUN"], log=tmp_path / "e.log", watch=lambda: calls.append(1))
    assert finished.require("num_users") == 30
    assert finished.seconds > 0
    assert finished.cpu_seconds > 0
    # The kernel also counts what the child was before it became the command: a copy of this process.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 1_000_000 < finished.peak_rss_bytes < max(1_000_000_000, 1.1 * own)
    text = (tmp_path / "e.log").read_text()
    assert text.startswith("$ tackboard evaluate RUN\n")
    assert "this is evaluate" in text and "a last word on stderr" in text


def test_an_answer_that_lacks_something_is_named(tmp_path: Path) -> None:
    finished = run_command("evaluate", ["evaluate", "RUN"], log=tmp_path / "e.log")
    with pytest.raises(StageError, match="answered without 'colour'"):
        finished.require("colour")


def test_a_failure_passes_its_code_and_shows_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "train:75")
    with pytest.raises(StageError) as caught:
        run_command("train", ["train", "demo"], log=tmp_path / "train.log")
    assert caught.value.exit_code == 75
    lines = str(caught.value).splitlines()
    assert lines[0] == "train failed with exit code 75: error: broken on purpose"
    assert len(lines) <= 3 and str(tmp_path / "train.log") in lines[-1]
    shown = capsys.readouterr().err
    assert "  | error: broken on purpose" in shown and "$ tackboard" not in shown


def test_death_by_a_signal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANG", "train")
    with Command(["train"], tmp_path / "train.log") as command:
        command.kill()
        error = command.failure("train")
    assert "signal SIGKILL" in str(error)
    assert error.exit_code == 1
