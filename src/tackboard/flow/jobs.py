"""Runs each step in its own process, several steps at a time, and reports finished, failed and unfinished steps.

With a process for each step, a step's peak memory can be measured, and a step that dies harms no other step. A step
waits for the step that it builds on. When time is up, or the program must stop, processes get SIGTERM. If a process is
training, it saves its state and ends, and the next call continues from that state. If this process dies, the processes
of steps get SIGTERM too. A process that dies of a signal (a crash, or the kernel's out-of-memory killer) is started
again from its last checkpoint. Such a death need not be the step's own fault: if processes share a GPU, a fault of one
process can kill them all. The process of a step calls `run_step`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tackboard.core.errors import Preempted, TackboardError, counted
from tackboard.core.locks import try_lock, wait_for_lock
from tackboard.core.machine import THREAD_VARIABLES, usable_cores
from tackboard.core.processes import PARENT_VARIABLE, POLL_S, Process, handled, stop_is_preemption, watch_parent
from tackboard.core.progress import say

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that holds this package. It is on the PYTHONPATH of every step, so that the step runs the same package."""
TELL_EVERY_S = 30.0
NUM_TAIL_LINES = 50
MAX_TRIES = 4
"""A step whose process dies of a signal is started at most this many times in one call."""
LATE_S, LATE_SHARE = 60.0, 0.1
"""No step starts in the last 60 s of the time limit, because it would soon have to stop. If a tenth of the time limit
is shorter than 60 s, no step starts in the last tenth."""
GRACE_S = 60.0
"""A stopped process may take this long to save its state. After that it is killed and loses unsaved work."""


def step_name(label: str, inputs: Mapping[str, Any]) -> str:
    """Returns the label and a hash of all inputs of a step, so that a name means the same work on every machine."""
    text = json.dumps(inputs, sort_keys=True)
    return f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A piece of work that is done once. Later calls find its result."""

    name: str
    """See `step_name`. Steps with the same name are the same step."""
    label: str
    """The name that people see."""
    log: Path
    """The file to which the process of the step prints. The output of earlier processes of the step stays in it."""
    command: Callable[[int], Sequence[str]]
    """Returns the command that starts the process with a number of threads. It is called when the step starts."""
    run: Callable[[], object]
    """Does the step in this process. Raises Preempted if the step was stopped."""
    is_finished: Callable[[], bool]
    """Returns whether the result of the step exists."""
    figures: Callable[[], Sequence[str]] = tuple
    """Returns words about the result, to show when the step is finished."""
    after: Step | None = None
    """The step whose result this step reads."""


@dataclass(frozen=True)
class Failure:
    """A step whose process failed: its exit code was neither 0 nor 75 (stopped), or it left no result."""

    step: Step
    code: int
    reason: str
    """The last error that the process printed, or else the last line that it printed."""


@dataclass(frozen=True)
class JobReport:
    """The outcome of one call of `JobRunner.run`."""

    num_found: int
    """Number of steps that were finished before this call."""
    num_done: int
    """Number of steps that this call finished."""
    failures: tuple[Failure, ...]
    left: tuple[Step, ...]
    """Unfinished steps, because time was up, the program was asked to stop, or a step that they build on failed."""
    is_stopped: bool
    """Whether steps are left because time was up or the program was asked to stop."""


class JobRunner:
    """Runs up to `jobs` steps at a time, each in a process of its own. If `jobs` is 0, this process runs the steps."""

    def __init__(self, *, jobs: int = 1, end: float | None = None, noun: str = "step") -> None:
        """`end` is the time to stop, by `time.monotonic`. `noun` is the word for a step in messages."""
        self.jobs = jobs
        self.end = end
        self.noun = noun
        self._last_start = None if end is None else end - min(LATE_S, LATE_SHARE * max(0.0, end - time.monotonic()))
        self._asked_to_stop = False
        self._tries: Counter[str] = Counter()

    def run(self, steps: Sequence[Step]) -> JobReport:
        """Finishes the steps, and the steps that they build on, as far as time and failures allow."""
        distinct = list({step.name: step for one in steps for step in _with_before(one)}.values())
        waiting = [step for step in distinct if not step.is_finished()]
        num_found, total = len(distinct) - len(waiting), len(distinct)
        say(f"{counted(total, self.noun)}, {num_found} of them finished before")
        if not self.jobs:
            return self._run_here(waiting, num_found)
        running: list[tuple[Step, Process]] = []
        failures: list[Failure] = []
        num_done, told = 0, time.monotonic()
        with handled(self._note, signal.SIGTERM, signal.SIGINT):
            try:
                while True:
                    for one in [one for one in running if one[1].poll() is not None]:
                        running.remove(one)
                        outcome = self._ended(*one)
                        num_done += outcome is None
                        if isinstance(outcome, Failure):
                            failures.append(outcome)
                        elif outcome is not None:
                            waiting.append(outcome)
                    if self._is_over():
                        break
                    ready = [step for step in waiting if step.after is None or step.after.is_finished()]
                    for step in [] if self._is_late() else ready[: self.jobs - len(running)]:
                        waiting.remove(step)
                        running.append((step, self._start(step)))
                        say(f"[{num_found + num_done + len(running)}/{total}] {step.label}")
                    if not running:
                        break
                    if time.monotonic() - told > TELL_EVERY_S:
                        told = time.monotonic()
                        say("; ".join([f"{num_found + num_done}/{total} finished", *(_words(*one) for one in running)]))
                    time.sleep(POLL_S)
            finally:
                waiting += self._stop(running)
        is_stopped = bool(waiting) and (self._is_over() or self._is_late())
        return JobReport(num_found, num_done, tuple(failures), tuple(waiting), is_stopped)

    def _run_here(self, steps: list[Step], num_found: int) -> JobReport:
        """Runs steps one after the other in this process, for example in a debugger. The first error is raised."""
        for number, step in enumerate(steps):
            try:
                with stop_is_preemption(self.end):
                    step.run()
            except Preempted as stopped:
                say(f"{stopped}: {step.label} is not finished")
                return JobReport(num_found, number, (), tuple(steps[number:]), is_stopped=True)
        return JobReport(num_found, len(steps), (), (), is_stopped=False)

    def _is_over(self) -> bool:
        return self._asked_to_stop or (self.end is not None and time.monotonic() >= self.end)

    def _is_late(self) -> bool:
        return self._last_start is not None and time.monotonic() >= self._last_start

    def _start(self, step: Step) -> Process:
        self._tries[step.name] += 1
        threads = max(1, usable_cores() // self.jobs)
        environment = {
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH", "")])),
            "PYTHONUNBUFFERED": "1",
            PARENT_VARIABLE: str(os.getpid()),
        }
        return Process(step.command(threads), log=step.log, environment=environment)

    def _ended(self, step: Step, process: Process) -> Failure | Step | None:
        """Returns None if the step is finished, the step itself if it must start again, or else the failure."""
        code, after = process.code, f"after {process.seconds:,.0f} s"
        if code == 0 and step.is_finished():
            say(f"done in {process.seconds:,.0f} s: {', '.join([step.label, *step.figures()])}")
            return None
        if code == Preempted.exit_code:
            say(f"stopped {after}, state saved: {step.label}")
            return step
        if code is not None and code < 0 and self._tries[step.name] < MAX_TRIES:
            tries = f"{self._tries[step.name]} of {MAX_TRIES} tries"
            say(f"died of signal {-code} {after}, {tries}: {step.label}; see {step.log}")
            return step
        say(f"FAILED with {code} {after}: {step.label}; see {step.log}")
        return Failure(step, code or 1, _reason(process))

    def _stop(self, running: list[tuple[Step, Process]]) -> list[Step]:
        """Asks processes to save and end, and kills processes that do not end in time. Returns the unfinished steps."""
        try:
            for _, process in running:
                process.send(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            for step, process in running:
                if process.wait(max(0.1, deadline - time.monotonic())) is None:
                    say(f"killed after {GRACE_S:.0f} s: {step.label} will continue from its last checkpoint")
        finally:  # A second signal ends the wait, but even then no process may keep running.
            for _, process in running:
                process.kill()
        return [step for step, _ in running if not step.is_finished()]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """Handles SIGTERM and SIGINT. The first signal ends the run as a time limit does. The second interrupts it."""
        if self._asked_to_stop:
            raise KeyboardInterrupt
        self._asked_to_stop = True


def run_step(work: Callable[[], object], *, lock: Path) -> int:
    """Runs `work` in the process of a step and returns the exit code. `work` returns the place of its result.

    Waits while another process holds `lock`. Stops the work on SIGTERM and when the parent process ends.
    """
    try:
        with stop_is_preemption():
            watch_parent()
            with _alone(lock):
                result = work()
    except TackboardError as error:
        say(f"{'' if isinstance(error, Preempted) else 'error: '}{error}")
        return error.exit_code
    say(f"done: {result}")
    return 0


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with try_lock(lock) as is_first:
        if is_first:
            yield
            return
    say(f"waiting: another process works on {lock.stem}")
    with wait_for_lock(lock):
        yield


def _with_before(step: Step) -> list[Step]:
    """Returns the steps that a step builds on, followed by the step itself."""
    return [*(_with_before(step.after) if step.after is not None else []), step]


def _words(step: Step, process: Process) -> str:
    """Describes the progress of a running step in words."""
    return ", ".join([f"{step.label} {process.seconds:,.0f} s", *_lines(process)[-1:]])


def _lines(process: Process) -> list[str]:
    """Returns the last lines that a process printed, cut to fit on a screen."""
    return [line.strip()[:200] for line in process.printed().splitlines()[-NUM_TAIL_LINES:] if line.strip()]


def _reason(process: Process) -> str:
    """Returns why a process failed: its last printed line that begins with `error: `, or else its last printed line."""
    lines = _lines(process)
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
