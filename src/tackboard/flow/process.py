"""One command of a pipeline: started as a user would type it, measured, and never left behind.

A command comes in as the words after `tackboard`; its last JSON line, its wall and CPU seconds and its largest
resident memory go out. Everything it prints goes to one log file. Decided: every command runs in a process group of its
own, and whatever ends the pipeline (success, an error, Ctrl-C, SIGTERM, a closed terminal) ends that group.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from tackboard.core.errors import EXIT_BUG, TackboardError, one_line
from tackboard.core.progress import say

PROGRAM = (sys.executable, "-m", "tackboard")
"""What `tackboard` stands for: the same Python, so that a pipeline never mixes two installations."""

POLL_S = 0.1
GRACE_S = 15.0
NUM_TAIL_LINES = 15


class StageError(TackboardError):
    """A command of the pipeline failed; carries its exit code."""

    def __init__(self, got: str, *, allowed: str = "", fix: str = "", exit_code: int = EXIT_BUG) -> None:
        super().__init__(got, allowed=allowed, fix=fix)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What one command did."""

    name: str
    arguments: tuple[str, ...]
    answer: dict[str, Any]
    """Its last line of JSON; empty if it printed none."""
    seconds: float
    cpu_seconds: float
    """User and system time, of its own workers too."""
    peak_rss_bytes: int

    def require(self, key: str) -> Any:
        """A value of the answer. Raises StageError where the command did not give it."""
        if key not in self.answer:
            raise StageError(
                f"`{typed(self.arguments)}` answered without {key!r}", allowed=f"it gave {sorted(self.answer)}"
            )
        return self.answer[key]


class Child:
    """A running `tackboard` command. Leaving its `with` block ends the whole process group."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.arguments = tuple(arguments)
        self.log = log
        self.peak_rss_bytes = 0
        self.seconds = 0.0
        self._final_cpu_seconds: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {typed(arguments)}\n")
        self._started = time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The exit code if the command has ended, else None. Also takes a sample of its memory."""
        if self.process.returncode is not None:
            return self.process.returncode
        self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(self.process.pid))
        # wait4 and not Popen.poll: the kernel then says what the command and its workers used, with nothing to sample.
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.seconds = time.monotonic() - self._started
        self._final_cpu_seconds = usage.ru_utime + usage.ru_stime
        self.peak_rss_bytes = max(self.peak_rss_bytes, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._kill_group()
        return self.process.returncode

    def cpu_seconds(self) -> float:
        """CPU time used so far, by the command and its live descendants."""
        if self._final_cpu_seconds is not None:
            return self._final_cpu_seconds
        return sum(process_cpu_seconds(pid) for pid in process_tree(self.process.pid))

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Asks the command to end (SIGTERM), ends its group by force after `grace_s`; returns its exit code."""
        if self.process.returncode is None:
            try:
                self.process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + grace_s
                while self.poll() is None and time.monotonic() < deadline:
                    time.sleep(POLL_S / 2)
            finally:
                # Also reached by a second Ctrl-C: then nobody waits any longer, but nothing stays behind either.
                if self.process.returncode is None:
                    self._kill_group()
                    self.process.wait()
        return self.process.returncode

    def last_lines(self, count: int = NUM_TAIL_LINES) -> list[str]:
        """The end of what the command printed."""
        return self.log.read_text(errors="replace").splitlines()[1:][-count:]

    def failure(self, name: str) -> StageError:
        """Prints the end of the log and makes the error of a command that ended with something other than 0."""
        code = self.process.returncode or EXIT_BUG
        lines = self.last_lines()
        for line in lines:
            say(f"  | {line}")
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return StageError(
            f"{name} failed with {ending}: {one_line(last)[:200]}",
            allowed=f"its command: {typed(self.arguments)}",
            fix=f"its whole output: {self.log}",
            exit_code=code if code > 0 else EXIT_BUG,
        )

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_command(name: str, arguments: Sequence[str], *, log: Path, watch: Callable[[], None] | None = None) -> Finished:
    """Runs one command to its end. `watch` is called ten times a second. A code other than 0 raises StageError."""
    with Child(arguments, log) as child:
        while (code := child.poll()) is None:
            if watch is not None:
                watch()
            time.sleep(POLL_S)
        if code != 0:
            raise child.failure(name)
        return Finished(
            name=name,
            arguments=child.arguments,
            answer=last_json_object(log.read_text(errors="replace")),
            seconds=child.seconds,
            cpu_seconds=child.cpu_seconds(),
            peak_rss_bytes=child.peak_rss_bytes,
        )


def typed(arguments: Sequence[str]) -> str:
    """The command as a user types it."""
    return shlex.join(["tackboard", *arguments])


def last_json_object(text: str) -> dict[str, Any]:
    """The last line that is a JSON object. Log lines may follow it: stdout and stderr share one file."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict):
                return value
    return {}


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP act like Ctrl-C, so that `finally` blocks run and children are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def process_tree(pid: int) -> list[int]:
    """A process and its live descendants; the process alone where there is no /proc."""
    found, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        found.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting.extend(int(word) for word in children.read_text().split())
    return found


def tree_rss_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; pages that they share count once for each. 0 without /proc."""
    pages = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError, IndexError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def process_cpu_seconds(pid: int) -> float:
    """User and system time of one process so far; 0 if it is gone or there is no /proc."""
    try:
        # The second field is the program's name in parentheses and may hold spaces; the rest follows the last ")".
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
