"""Steps run in processes of their own. Each does a little, for as long as its test needs."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.errors import DataError, Preempted
from tackboard.core.processes import PARENT_VARIABLE, Process
from tackboard.flow import jobs
from tackboard.flow.jobs import JobRunner, Step, run_step, step_name

SOURCE = Path(__file__).parents[3] / "src"
PROGRAM = r"""
import json, os, signal, sys, time
from pathlib import Path
root, label, result, told, threads = sys.argv[1:]
told = json.loads(told)
print("of", os.environ["TACKBOARD_PARENT"], flush=True)
print("threads", threads, os.environ["OMP_NUM_THREADS"], flush=True)
def stop(number, frame):
    Path(root, "saved-" + label).write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if told.get("deaf") else stop)
with open(Path(root) / "order.txt", "a") as order:
    order.write(f"{label}\n")
time.sleep(told.get("seconds", 0))
tries = Path(root, "tries-" + label)
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) <= told.get("crashes", 0):
    os.kill(os.getpid(), signal.SIGABRT)
if told.get("code") is not None:
    print("error: it broke\nallowed: whole ones\nuse another")
    sys.exit(told["code"])
Path(result).write_text("0.25")
"""

MakeStep = Callable[..., Step]


@pytest.fixture
def step(tmp_path: Path) -> MakeStep:
    """A function of a label, the step before and what to do, that makes a step."""

    def make(label: str, after: Step | None = None, **told: Any) -> Step:
        name = step_name(label, {"told": told, "after": after.name if after else None})
        result = tmp_path / f"{name}.result"

        def run() -> None:
            assert after is None or after.is_finished()
            time.sleep(told.get("seconds", 0))
            result.write_text("0.5")

        return Step(
            name=name,
            label=label,
            log=tmp_path / f"{name}.log",
            command=lambda threads: [
                *(sys.executable, "-c", PROGRAM),
                *(str(tmp_path), label, str(result), json.dumps(told), str(threads)),
            ],
            run=run,
            is_finished=result.exists,
            figures=lambda: [f"hr@10 {result.read_text()}"],
            after=after,
        )

    return make


@pytest.fixture
def started(tmp_path: Path) -> Callable[[], list[str]]:
    """A function that gives the labels of all processes so far, in the order of their start."""
    return lambda: (tmp_path / "order.txt").read_text().split()


def processes_of(root: Path) -> list[int]:
    """The processes whose command names `root`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(root).encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def stop_soon(root: Path) -> None:
    """Sends SIGTERM to this process once a step works."""

    def ask() -> None:
        while not (root / "order.txt").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()


def test_a_name_holds_the_hash_of_the_inputs() -> None:
    """The hash is written down here: another one would lose every result that was found before."""
    assert step_name("one", {"b": 1, "a": None}) == step_name("one", {"a": None, "b": 1}) == "one-84950323fcba"
    assert step_name("one", {"a": None, "b": 2}) != step_name("one", {"a": None, "b": 1})


def test_steps_are_done_once_and_after_those_they_build_on(
    step: MakeStep, started: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = step("first", seconds=0.3)
    steps = [step("second", first), step("third", first), step("alone")]
    report = JobRunner(jobs=2).run(steps)
    assert (report.num_found, report.num_done, report.failures, report.left) == (0, 4, (), ())
    assert not report.is_stopped
    assert sorted(started()) == ["alone", "first", "second", "third"]
    assert started().index("second") > started().index("alone"), "it waited for the first"
    again = JobRunner(jobs=2, noun="cell").run(steps)
    assert (again.num_found, again.num_done) == (4, 0)
    assert len(started()) == 4
    told = capsys.readouterr().err
    assert "4 steps, 0 of them finished before" in told and "[4/4] " in told and "first, hr@10 0.25" in told
    assert "4 cells, 4 of them finished before" in told


def test_step_that_dies_of_a_signal_is_started_again(
    step: MakeStep, started: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    often = jobs.MAX_TRIES
    steps = [step("shaky", crashes=often - 1), step("broken", crashes=often), step("good")]
    report = JobRunner(jobs=2).run(steps)
    assert report.num_done == 2 and [one.step.label for one in report.failures] == ["broken"]
    assert report.failures[0].code == -signal.SIGABRT
    assert started().count("shaky") == often and started().count("broken") == often
    words = rf"died of signal 6 after \d+ s, 1 of {often} tries: shaky; see {re.escape(str(steps[0].log))}\n"
    assert re.search(words, capsys.readouterr().err)


def test_failing_step_stops_only_what_builds_on_it(step: MakeStep, capsys: pytest.CaptureFixture[str]) -> None:
    bad = step("bad", code=4)
    report = JobRunner().run([step("child", bad), bad, step("good")])
    assert report.num_done == 1 and not report.is_stopped
    assert [(one.step.label, one.code, one.reason) for one in report.failures] == [("bad", 4, "error: it broke")]
    assert "error: it broke" in bad.log.read_text()
    assert [one.label for one in report.left] == ["child"]
    assert re.search(rf"FAILED with 4 after \d+ s: bad; see {re.escape(str(bad.log))}\n", capsys.readouterr().err)
    assert JobRunner().run([bad]).failures, "a failed step is tried again"


def test_a_process_that_ends_well_without_a_result_failed(step: MakeStep) -> None:
    assert [one.code for one in JobRunner().run([step("empty", code=0)]).failures] == [1]


def test_reason_is_that_of_the_last_try(step: MakeStep, tmp_path: Path) -> None:
    bad = step("bad", code=1)
    bad.log.write_text("error: of yesterday\n")
    assert [one.reason for one in JobRunner().run([bad]).failures] == ["error: it broke"]
    log = tmp_path / "log"
    log.write_text("error: of yesterday\n")
    process = Process(["/bin/sh", "-c", "echo Traceback; echo ValueError: no error of ours; echo"], log=log)
    process.wait()
    assert jobs._reason(process) == "ValueError: no error of ours"
    log.unlink()
    assert jobs._reason(process) == ""


def test_words_of_progress(step: MakeStep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TELL_EVERY_S", 0.0)
    JobRunner().run([step("slow", seconds=0.5)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 step, 0 of them finished before"
    assert any(line.startswith("0/1 finished; slow 0 s") for line in lines)
    assert not any(line.endswith((", ", " ")) for line in lines)


def test_when_time_is_up_processes_save_and_the_rest_is_left(
    step: MakeStep, started: Callable[[], list[str]], tmp_path: Path
) -> None:
    began = time.monotonic()
    report = JobRunner(end=time.monotonic() + 1.0).run([step("slow", seconds=60), step("later")])
    assert time.monotonic() - began < 10
    assert report.is_stopped and not report.failures
    assert sorted(one.label for one in report.left) == ["later", "slow"]
    assert (tmp_path / "saved-slow").exists()
    assert started() == ["slow"]


def test_nothing_is_started_shortly_before_the_end(
    step: MakeStep, started: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LATE_SHARE", 0.999)
    began = time.monotonic()
    report = JobRunner(end=began + 30.0).run([step("first", seconds=0.5), step("second")])
    assert time.monotonic() - began < 10, "it does not wait for an end that nothing runs towards"
    assert report.is_stopped and not report.failures
    assert [one.label for one in report.left] == ["second"] and started() == ["first"]


def test_a_process_that_does_not_end_is_killed(
    step: MakeStep, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_S", 0.3)
    stop_soon(tmp_path)
    report = JobRunner().run([step("deaf", seconds=60, deaf=True)])
    assert report.is_stopped and [one.label for one in report.left] == ["deaf"]
    assert "killed after 0 s: deaf will continue from its last checkpoint" in capsys.readouterr().err
    assert processes_of(tmp_path) == []


def test_cores_are_shared_by_the_processes(step: MakeStep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "usable_cores", lambda: 16)
    one = step("one")
    JobRunner(jobs=3).run([one])
    assert one.log.read_text().splitlines() == [f"of {os.getpid()}", "threads 5 5"]


def test_without_jobs_steps_run_here(step: MakeStep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = step("first")
    report = JobRunner(jobs=0).run([step("second", first), first])
    assert (report.num_done, report.left, report.is_stopped) == (2, (), False)
    assert not (tmp_path / "order.txt").exists(), "no process was started"
    late = JobRunner(jobs=0, end=time.monotonic() + 0.2).run([first, step("slow", seconds=60), step("later")])
    assert (late.num_found, late.num_done, late.is_stopped) == (1, 0, True)
    assert [one.label for one in late.left] == ["slow", "later"]
    assert "stopped by signal 15: slow is not finished" in capsys.readouterr().err


# ---- what the process of a step does ----


def start(work: str, lock: Path, log: Path, **environment: str) -> Process:
    """A process that calls `run_step` with a function `work` of its own."""
    program = f"import sys, time\nfrom pathlib import Path\nfrom tackboard.flow.jobs import run_step\n{work}\n"
    program += f"sys.exit(run_step(work, lock=Path({str(lock)!r})))"
    return Process([sys.executable, "-c", program], log=log, environment={"PYTHONPATH": str(SOURCE), **environment})


def test_a_step_says_its_result_or_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "one.lock"
    assert run_step(lambda: tmp_path / "result", lock=lock) == 0
    assert capsys.readouterr().err == f"done: {tmp_path / 'result'}\n"

    def fail(error: Exception) -> int:
        def work() -> None:
            raise error

        return run_step(work, lock=lock)

    assert fail(DataError("it broke", fix="mend it")) == DataError.exit_code
    assert fail(Preempted("stopped")) == Preempted.exit_code
    assert capsys.readouterr().err == "error: it broke\nmend it\nstopped\n"
    with pytest.raises(ValueError, match="a bug"):
        fail(ValueError("a bug"))
    assert not lock.exists()


def test_a_step_that_another_process_works_on_is_waited_for(tmp_path: Path) -> None:
    held, lock = tmp_path / "held", tmp_path / "one.lock"
    hold = f"def work():\n    Path({str(held)!r}).touch()\n    while Path({str(held)!r}).exists(): time.sleep(0.01)"
    first = start(hold, lock, tmp_path / "first.log")
    while not held.exists():
        assert first.wait(0.01) is None, first.printed()
    second = start("def work(): return 'what the first one did'", lock, tmp_path / "second.log")
    while "waiting: another process works on one" not in second.printed():
        assert second.wait(0.01) is None, second.printed()
    assert "done" not in second.printed()
    held.unlink()
    assert first.wait() == second.wait() == 0
    assert second.printed().endswith("done: what the first one did\n")


def test_a_step_ends_when_it_is_asked_and_with_the_process_that_started_it(tmp_path: Path) -> None:
    work = "def work(): print('here', flush=True); time.sleep(60)"
    asked = start(work, tmp_path / "one.lock", tmp_path / "asked.log")
    while "here" not in asked.printed():
        assert asked.wait(0.01) is None, asked.printed()
    assert asked.stop() == Preempted.exit_code
    orphan = start(work, tmp_path / "two.lock", tmp_path / "orphan.log", **{PARENT_VARIABLE: "1"})
    assert orphan.wait() == Preempted.exit_code
    for process in (asked, orphan):
        assert process.printed().endswith("stopped by signal 15\n")


def test_a_step_saves_and_ends_where_its_runner_was_killed(tmp_path: Path) -> None:
    child = (
        "import sys, time\nfrom pathlib import Path\nfrom tackboard.flow.jobs import run_step\n"
        "def work(): print('here', flush=True); time.sleep(60)\n"
        f"sys.exit(run_step(work, lock=Path({str(tmp_path / 'one.lock')!r})))"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom tackboard.flow.jobs import JobRunner, Step\n"
        f"command = [sys.executable, '-c', {child!r}]\n"
        f"one = Step(name='one', label='one', log=Path({str(tmp_path / 'one.log')!r}),\n"
        "           command=lambda threads: command, run=lambda: None, is_finished=lambda: False)\n"
        "JobRunner().run([one])"
    )
    log = tmp_path / "one.log"
    runner = Process([sys.executable, "-c", program], environment={"PYTHONPATH": str(SOURCE)})
    while not (log.exists() and "here" in log.read_text()):
        assert runner.wait(0.01) is None
    assert runner.kill() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while not log.read_text().endswith("stopped by signal 15\n"):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_second_signal_waits_for_nothing() -> None:
    runner = JobRunner()
    runner._note(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        runner._note(signal.SIGINT, None)
