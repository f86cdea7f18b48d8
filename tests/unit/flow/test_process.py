"""Commands of a pipeline: their answers are read, their failures passed on, and none outlives the pipeline."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tackboard.flow.process import (
    Child,
    StageError,
    last_json_object,
    process_cpu_seconds,
    process_tree,
    run_command,
    signals_interrupt,
    tree_rss_bytes,
    typed,
)

pytestmark = pytest.mark.usefixtures("fake_commands")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: "object", within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


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
    assert "  | error: broken on purpose" in capsys.readouterr().err


def test_death_by_a_signal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANG", "train")
    with Child(["train"], tmp_path / "train.log") as child:
        child.process.kill()
        wait_until(lambda: child.poll() is not None)
        error = child.failure("train")
    assert "signal SIGKILL" in str(error)
    assert error.exit_code == 1


def test_leaving_the_block_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANG", "train")
    with pytest.raises(KeyboardInterrupt):
        with Child(["train"], tmp_path / "train.log") as child:
            wait_until(lambda: len(process_tree(child.process.pid)) == 2)
            family = process_tree(child.process.pid)
            raise KeyboardInterrupt
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr("tackboard.flow.process.PROGRAM", (sys.executable, "-c", deaf))
    child = Child([], tmp_path / "deaf.log")
    wait_until(lambda: child.last_lines() == ["deaf"])
    assert child.stop(grace_s=0.2) == -signal.SIGKILL


def test_memory_and_time_of_a_process() -> None:
    assert tree_rss_bytes(os.getpid()) > 10_000_000
    assert process_cpu_seconds(os.getpid()) > 0
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert tree_rss_bytes(gone.pid) == 0
    assert process_cpu_seconds(gone.pid) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('log\n{"a": 1}\nwarning: late\n', {"a": 1}),
        ('{"a": 1}\n{"a": 2}\n{broken\n', {"a": 2}),
        ("nothing\n[1]\n", {}),
        ("", {}),
    ],
)
def test_the_last_json_object_is_the_answer(text: str, answer: dict[str, int]) -> None:
    assert last_json_object(text) == answer


def test_a_command_is_shown_so_that_it_can_be_pasted() -> None:
    assert typed(["train", "a b.py:run", "--json"]) == "tackboard train 'a b.py:run' --json"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_like_ctrl_c_and_only_inside(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with signals_interrupt():
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert signal.getsignal(number) is before


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    seen = []

    def work() -> None:
        with signals_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
