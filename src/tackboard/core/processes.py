"""Starts, stops, reaps and measures child processes, and handles the signals that this process gets.

`Process` is a running command; `ask` runs a short command to its end and returns an `Answer`. Decided: by default a
`Process` gets its own process group, and the whole group is killed when the command ends, so no worker stays behind.
Ctrl-C then reaches only this process, which must stop its commands. A `Process` is reaped by wait4, so the kernel
reports the CPU time and memory of a command and its workers. Only this module starts processes
(`tests/rules/test_processes.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from types import FrameType
from typing import Any, Self

from tackboard.core.errors import Preempted, one_line

POLL_S = 0.1
SAMPLE_S = 0.05
GRACE_S = 15.0
WATCH_EVERY_S = 0.5
PARENT_VARIABLE = "TACKBOARD_PARENT"
"""This environment variable tells a child the PID of its parent. `watch_parent` ends the child when the parent ends."""
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


class Process:
    """A running command. Leaving its `with` block ends the command. Several threads may call its methods."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        own_group: bool = True,
        sample_memory: bool = False,
        keep_open: Sequence[int] = (),
    ) -> None:
        """Starts the command. Its output is appended to `log`, and `environment` is added to our own environment.

        The command inherits the file descriptors in `keep_open`. With `sample_memory`, `poll` also measures the memory
        of the whole process tree.
        """
        self.log = log or Path(os.devnull)
        self.code: int | None = None
        """None until `poll` has seen that the command ended; then its exit code, or -N if signal N ended it."""
        self.peak_rss_bytes = 0
        self._own_group, self._samples_memory = own_group, sample_memory
        self._seconds = self._cpu_seconds = 0.0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        with self.log.open("ab") as output:
            self._begin = output.seek(0, os.SEEK_END)
            self._process = Popen(
                command,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=own_group,
                pass_fds=keep_open,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Wall-clock time from the start until now, or until the end of the command."""
        return self._seconds if self.code is not None else time.monotonic() - self._started

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the command and its descendants have used so far."""
        return self._cpu_seconds if self.code is not None else sum(map(process_cpu_seconds, process_tree(self.pid)))

    def poll(self) -> int | None:
        """Returns the exit code if the command has ended, else None."""
        with self._lock:
            if self.code is None:
                if self._samples_memory:
                    self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(self.pid))
                self._reap()
            return self.code

    def wait(self, within_s: float = math.inf) -> int | None:
        """Waits until the command ends; returns the exit code, or None if the command still runs after `within_s`."""
        deadline, pause_s = time.monotonic() + within_s, 0.001
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S / 2)
        return code

    def send(self, number: int) -> None:
        """Sends a signal to the command, if it still runs."""
        with self._lock:  # No thread reaps the process during this block, so its PID cannot go to another process.
            if self.code is None:
                os.kill(self.pid, number)

    def kill(self) -> int:
        """Kills the command, together with its own process group if it has one; returns the exit code."""
        while (code := self.poll()) is None:
            self.send(signal.SIGKILL)
            self.wait(1.0)
        return code

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Asks the command to end (SIGTERM) and kills it if it still runs after `grace_s`; returns the exit code."""
        try:
            self.send(signal.SIGTERM)
            self.wait(grace_s)
        finally:
            # A second Ctrl-C ends the waiting, but the command is still killed here.
            code = self.kill()
        return code

    def printed(self) -> str:
        """Returns the output of this command so far, without the output of earlier commands in the same log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def _reap(self) -> None:
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            self.code = 0  # This process ignores SIGCHLD, so the kernel does not tell how the child ended.
        else:
            if pid == 0:
                return
            self.code = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = usage.ru_utime + usage.ru_stime
            self.peak_rss_bytes = max(self.peak_rss_bytes, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        self._seconds = time.monotonic() - self._started
        self._process.returncode = self.code
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a short command that has ended."""

    code: int
    output: str = ""
    errors: str = ""
    peak_bytes: int = 0
    """Largest memory of the process tree, if it was sampled. A page that N processes share counts as 1/N for each."""

    @property
    def reason(self) -> str:
        """The reason why the command failed: the last line of its errors, or its exit code."""
        return one_line((self.errors.strip().splitlines() or [f"exit code {self.code}"])[-1])[:300]


def ask(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    sample_memory: bool = False,
) -> Answer:
    """Runs a command to its end. Raises OSError for a missing command, and TimeoutError after `timeout_s` seconds."""
    deadline, peak_bytes = time.monotonic() + (math.inf if timeout_s is None else timeout_s), 0
    env = {**os.environ, **(environment or {})}
    with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, env=env) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=SAMPLE_S if sample_memory else timeout_s)
                    return Answer(process.returncode, output, errors, peak_bytes)
                except TimeoutExpired:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"{command[0]} took longer than {timeout_s} s") from None
                    peak_bytes = max(peak_bytes, sum(map(pss_bytes, process_tree(process.pid))))
        finally:
            process.kill()


def last_json_object(text: str) -> dict[str, Any]:
    """Parses the last line of `text` that is a JSON object, even if other lines follow. Returns {} if there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(line))
    return {}


# ---- signals that this process gets ----


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Within the block, `handler` gets these signals. In threads other than the main thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def signals_interrupt() -> contextlib.AbstractContextManager[None]:
    """Within the block, SIGTERM and SIGHUP act like Ctrl-C, so `finally` blocks run and children are stopped."""
    return handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_is_preemption(end: float | None = None) -> Iterator[None]:
    """Within the block, SIGTERM raises Preempted. Use this for work that loses nothing if the work stops at once.

    If the block still runs at `end` (by `time.monotonic`), this process sends SIGTERM to itself.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Preempted(f"stopped by signal {number}")

    timer = threading.Timer(0 if end is None else max(0.0, end - time.monotonic()), _stop_myself)
    with handled(stop, signal.SIGTERM):
        try:
            if end is not None:
                timer.start()
            yield
        finally:
            timer.cancel()
            if end is not None:
                timer.join()  # If the timer has just sent the signal, our handler must still be in place.


def watch_parent() -> None:
    """Sends SIGTERM to this process when the parent process, named by PARENT_VARIABLE, has ended. Does not block."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
        _stop_myself()  # The parent was killed before it could stop this process, and nobody waits for the result.

    if parent:
        threading.Thread(target=watch, daemon=True).start()


# ---- memory and CPU time of processes ----


def process_tree(pid: int) -> list[int]:
    """Returns a process and its live descendants. Without /proc, returns only the process itself."""
    found = [pid]
    for member in found:  # The list grows while the loop runs.
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def tree_rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process tree. Shared pages count once per process. Returns 0 without /proc."""
    words = (_read(member, "statm").split() for member in process_tree(pid))
    return sum(int(found[1]) for found in words if found) * os.sysconf("SC_PAGE_SIZE")


def pss_bytes(pid: int) -> int:
    """Returns the memory of a process, or 0 if it is unknown. A page that N processes share counts as 1/N."""
    lines = _read(pid, "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def process_cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and its ended children; 0 if the process has ended or there is no /proc."""
    # The second field, the program's name in parentheses, may contain spaces. All later fields follow the last ")".
    return sum(map(int, _read(pid, "stat").rpartition(")")[2].split()[11:15])) * TICK_SECONDS


def own_cpu_seconds() -> float:
    """Returns the user and system time of this process, its threads and all its descendants."""
    own = time.process_time() + sum(os.times()[2:4])
    return own + sum(map(process_cpu_seconds, process_tree(os.getpid())[1:]))


def _read(pid: int, name: str) -> str:
    """Returns the text of a file of /proc/PID. It is empty if the process has ended or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
