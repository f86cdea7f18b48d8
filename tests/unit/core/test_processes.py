"""Processes end when they are told to, with all that they started, and what they used is known."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.core.errors import Preempted
from tackboard.core.processes import (
    PARENT_VARIABLE,
    Answer,
    Process,
    ask,
    handled,
    last_json_object,
    own_cpu_seconds,
    process_cpu_seconds,
    process_tree,
    pss_bytes,
    signals_interrupt,
    stop_is_preemption,
    tree_rss_bytes,
)

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
SLEEP = "import time; print('here', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
PARENT = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print('here', flush=True); "
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_a_process_prints_to_its_log_and_is_measured(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of yesterday\n")
    code = "import os, sys; print(os.environ['ADDED'], os.environ['HOME']); print('last', file=sys.stderr); sys.exit(3)"
    process = Process(python(BUSY + code), log=log, environment={"ADDED": "word"})
    assert process.wait() == process.code == process.poll() == 3
    assert sorted(process.printed().splitlines()) == sorted([f"word {os.environ['HOME']}", "last"])
    assert log.read_text().startswith("of yesterday\n")
    assert process.cpu_seconds() >= 0.28
    assert process.seconds == process.seconds > 0, "the clock stands once the process has ended"
    assert process.peak_rss_bytes > 1_000_000
    process.send(signal.SIGTERM)
    assert process.stop() == process.kill() == 3, "what has ended stays as it ended"
    log.unlink()
    assert process.printed() == ""


def test_a_process_that_runs_is_measured_too() -> None:
    with Process(python(BUSY + SLEEP), sample_memory=True) as process:
        wait_until(lambda: process.cpu_seconds() >= 0.28)
        assert process.poll() is None and process.wait(0.05) is None
        assert process.peak_rss_bytes > 1_000_000 and 0 < process.seconds < 60
    assert process.code == -signal.SIGTERM


def test_leaving_the_block_ends_the_whole_group() -> None:
    with pytest.raises(KeyboardInterrupt):
        with Process(python(PARENT + "time.sleep(60)")) as process:
            wait_until(lambda: len(process_tree(process.pid)) == 2)
            family = process_tree(process.pid)
            assert os.getpgid(process.pid) == process.pid
            raise KeyboardInterrupt
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def test_what_a_process_leaves_behind_ends_with_it() -> None:
    process = Process(python(PARENT + "time.sleep(0.3)"))
    wait_until(lambda: len(process_tree(process.pid)) == 2)
    family = process_tree(process.pid)
    assert process.wait() == 0
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = Process(python(DEAF), log=tmp_path / "log")
    wait_until(lambda: process.printed() == "here\n")
    assert process.stop(grace_s=0.2) == -signal.SIGKILL


def test_a_process_of_our_group_inherits_what_it_is_given() -> None:
    reader, writer = os.pipe()
    code = f"import os, time; os.write({writer}, str(os.getpgid(0)).encode()); time.sleep(60)"
    process = Process(python(code), own_group=False, keep_open=[writer])
    os.close(writer)
    assert int(os.read(reader, 20)) == os.getpgid(0)
    assert process.kill() == -signal.SIGKILL
    assert os.read(reader, 20) == b"", "nobody holds the other end any more"
    os.close(reader)


def test_threads_may_end_a_process_at_the_same_time() -> None:
    process, codes = Process(python(SLEEP)), []
    threads = [threading.Thread(target=lambda: codes.append(process.kill())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [-signal.SIGKILL] * 8


def test_a_process_ends_also_where_children_are_not_waited_for() -> None:
    """A shell or a container may start us with SIGCHLD ignored; then the kernel forgets how children ended."""
    code = (
        "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from tackboard.core.processes import Process\n"
        f"process = Process([sys.executable, '-c', {SLEEP!r}])\n"
        "assert process.poll() is None\n"
        "print(process.kill(), process.poll())"
    )
    assert ask(python(code), timeout_s=60).output == "0 0\n"


def test_an_answer_has_both_outputs_and_the_reason() -> None:
    done = ask(python("import sys; print(1); print('Traceback\\nValueError:  no\\n', file=sys.stderr); sys.exit(4)"))
    assert (done.code, done.output, done.errors, done.peak_bytes) == (4, "1\n", "Traceback\nValueError:  no\n\n", 0)
    assert done.reason == "ValueError: no"
    assert Answer(5, "", "\n").reason == "exit code 5"
    assert ask(python("import os; print(os.environ['ADDED'])"), environment={"ADDED": "word"}).output == "word\n"


def test_a_command_that_is_not_there_or_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        ask([str(tmp_path / "absent")])
    started = time.monotonic()
    for sampled in (False, True):
        with pytest.raises(TimeoutError, match=r"took longer than 0\.2 s"):
            ask(python(DEAF), timeout_s=0.2, sample_memory=sampled)
    assert time.monotonic() - started < 30


def test_memory_of_a_tree_is_seen() -> None:
    child = "import time\nx = bytearray(b'1') * (64 << 20)\ntime.sleep(0.6)\n"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\nprint('done')"
    done = ask(python(parent), sample_memory=True)
    assert (done.code, done.output, done.errors) == (0, "done\n", "")
    assert 64 << 20 < done.peak_bytes < 300 << 20


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
        with handled(lambda *_: None, signal.SIGTERM):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_request_to_stop_and_the_end_of_the_time_are_preemption() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="stopped by signal 15"):
        with stop_is_preemption():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    with pytest.raises(Preempted):
        with stop_is_preemption(end=time.monotonic() + 0.1):
            time.sleep(30)
    with stop_is_preemption(end=time.monotonic() + 30):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize(("parent", "code"), [("another", -signal.SIGTERM), ("this one", 0), ("", 0)])
def test_a_process_stops_without_its_parent(parent: str, code: int) -> None:
    program = (
        "from tackboard.core import processes; processes.WATCH_EVERY_S = 0.01\n"
        "import time; processes.watch_parent(); time.sleep(0.5)"
    )
    environment = {PARENT_VARIABLE: "1" if parent == "another" else str(os.getpid())} if parent else {}
    assert ask(python(program), environment=environment).code == code


def test_cpu_time_of_a_child_counts_while_it_lives_and_after() -> None:
    before = own_cpu_seconds()
    with subprocess.Popen(
        python(BUSY + "print(1, flush=True)\ninput()"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert child.pid in process_tree(os.getpid())
        alive = own_cpu_seconds() - before
        child.communicate(b"\n")
    ended = own_cpu_seconds() - before
    assert alive >= 0.28
    assert ended >= 0.28


def test_memory_and_time_of_a_process() -> None:
    assert tree_rss_bytes(os.getpid()) > 10_000_000
    assert pss_bytes(os.getpid()) > 1 << 20
    assert process_cpu_seconds(os.getpid()) > 0
    gone = subprocess.Popen(python(""))
    gone.wait()
    for measure in (tree_rss_bytes, pss_bytes, process_cpu_seconds):
        assert measure(gone.pid) == 0
