"""Runs cells, several at a time, each in a process of its own: cells in; what is done, what failed, what is left out.

A process of its own gives each cell its own peak memory, and a cell that dies takes nothing with it. Cells that build
on another wait for it. When time is up, or the program is asked to stop, processes get SIGTERM: one that trains saves
its state and ends, and the next call goes on from there. Processes watch this one and do the same if it is gone. One
that dies of a signal (a crash, the kernel's killer of processes) is started again, from its last checkpoint: with
several processes on one GPU a fault of one can take all of them along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from tackboard.bench.quality_cell import PARENT_VARIABLE, Machine, run_cell, stop_is_preemption
from tackboard.bench.quality_cells import Cell, Work
from tackboard.core.errors import Preempted, counted
from tackboard.core.machine import THREAD_VARIABLES, usable_cores
from tackboard.core.progress import say

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of this package: a process must run the same one."""
PROGRAM = "tackboard.bench.quality_cell"
"""The module that does a cell, run as WORK SPEC DEVICE THREADS."""
TRY_AGAIN = -1000
"""The code of a process that is to be started again; no process ends with it."""
POLL_S = 0.1
TELL_EVERY_S = 30.0
MAX_TRIES = 4
"""How often a cell is started in one call where its process dies of a signal."""
LATE_S, LATE_SHARE = 60.0, 0.1
"""How long before the end no cell is started any more, and the most that is of all the time there is: what begins then
would have trained next to nothing when it has to stop."""
GRACE_S = 60.0
"""How long a process that was asked to stop may take to save; then it is killed, and loses what it did since its last
checkpoint."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A cell whose process ended with another code than 0 and 75."""

    cell: Cell
    code: int
    log: Path
    reason: str
    """The last error that the process printed, or else its last line."""


@dataclasses.dataclass(frozen=True)
class Report:
    """How a round of cells went."""

    num_found: int
    """Cells that were finished before."""
    num_done: int
    """Cells that were finished now."""
    failures: tuple[Failure, ...]
    left: tuple[Cell, ...]
    """Cells that are not finished because time was up, or that wait for one that failed."""
    is_stopped: bool
    """Whether time was up, or somebody asked to stop."""


@dataclasses.dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begin: int
    """Where in its log this process begins: earlier ones wrote before it."""
    started: float


class Pool:
    """`jobs` processes that work through cells; 0: this process does."""

    def __init__(self, work: Work, *, jobs: int = 1, device: str = "auto", end: float | None = None) -> None:
        """`end` is when to stop, by `time.monotonic`."""
        self.work = work
        self.jobs = jobs
        self.device = device
        self.end = end
        now = time.monotonic()
        self._last_start = None if end is None else end - min(LATE_S, LATE_SHARE * max(0.0, end - now))
        self._asked_to_stop = False
        self._tries: Counter[str] = Counter()

    def run(self, cells: Sequence[Cell]) -> Report:
        """Finishes the cells, as far as time and failures allow."""
        distinct = list({cell.name: cell for one in cells for cell in _with_before(one)}.values())
        waiting = [cell for cell in distinct if self.work.find(cell) is None]
        num_found, total = len(distinct) - len(waiting), len(distinct)
        say(f"{counted(total, 'cell')}, {num_found} of them finished before")
        if not self.jobs:
            return self._run_here(waiting, num_found)
        running: list[_Running] = []
        failures: list[Failure] = []
        num_done, told = 0, time.monotonic()
        with self._stop_signals():
            try:
                while True:
                    for one in [one for one in running if one.process.poll() is not None]:
                        running.remove(one)
                        code = self._ended(one, failures)
                        num_done += code == 0
                        if code in (Preempted.exit_code, TRY_AGAIN):
                            waiting.append(one.cell)
                    if self._is_over():
                        break
                    failed = {failure.cell.name for failure in failures}
                    startable = [] if self._is_late() else [cell for cell in waiting if self._can_start(cell, failed)]
                    for cell in startable[: self.jobs - len(running)]:
                        waiting.remove(cell)
                        running.append(self._start(cell, num_found + num_done + len(running) + 1, total))
                    if not running:
                        break
                    if time.monotonic() - told > TELL_EVERY_S:
                        told = time.monotonic()
                        self._tell(running, num_found + num_done, total)
                    time.sleep(POLL_S)
            finally:
                waiting += self._stop(running)
        is_stopped = bool(waiting) and (self._is_over() or self._is_late())
        return Report(num_found, num_done, tuple(failures), tuple(waiting), is_stopped)

    def _run_here(self, cells: list[Cell], num_found: int) -> Report:
        """Cells one after the other in this process, to look into one with a debugger, say; the first error ends it."""
        machine = Machine(device=self.device, num_threads=torch.get_num_threads())
        for number, cell in enumerate(cells):
            try:
                with stop_is_preemption(self.end):
                    run_cell(self.work, cell, machine)
            except Preempted as stopped:
                say(f"{stopped}: {cell.label} is not finished")
                return Report(num_found, number, (), tuple(cells[number:]), is_stopped=True)
        return Report(num_found, len(cells), (), (), is_stopped=False)

    def _is_over(self) -> bool:
        return self._asked_to_stop or (self.end is not None and time.monotonic() >= self.end)

    def _is_late(self) -> bool:
        return self._last_start is not None and time.monotonic() >= self._last_start

    def _can_start(self, cell: Cell, failed: set[str]) -> bool:
        return cell.name not in failed and (cell.after is None or self.work.find(cell.after) is not None)

    def _start(self, cell: Cell, number: int, total: int) -> _Running:
        self._tries[cell.name] += 1
        threads = max(1, usable_cores() // self.jobs)
        log = self.work.log(cell).open("ab")
        begin = log.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", PROGRAM, str(self.work.root), str(self.work.spec(cell))]
        process = subprocess.Popen(
            [*command, self.device, str(threads)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                **dict.fromkeys(THREAD_VARIABLES, str(threads)),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH", "")])),
                "PYTHONUNBUFFERED": "1",
                PARENT_VARIABLE: str(os.getpid()),
            },
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on as SIGTERM.
        )
        say(f"[{number}/{total}] {cell.label}")
        return _Running(cell, process, log, begin, time.monotonic())

    def _ended(self, one: _Running, failures: list[Failure]) -> int:
        one.log.close()
        code, seconds = one.process.returncode, time.monotonic() - one.started
        result = self.work.find(one.cell) if code == 0 else None
        if result is not None:
            metrics = result.values.get("metrics", {})
            figures = [f"{name} {metrics[name]:.4f}" for name in ("hr@10", "ndcg@10") if name in metrics]
            say(f"done in {seconds:,.0f} s: {', '.join([one.cell.label, *figures])}")
        elif code == Preempted.exit_code:
            say(f"stopped after {seconds:,.0f} s, state saved: {one.cell.label}")
        elif code < 0 and self._tries[one.cell.name] < MAX_TRIES:
            tries = f"{self._tries[one.cell.name]} of {MAX_TRIES} tries"
            say(f"died of signal {-code} after {seconds:,.0f} s, {tries}: {one.cell.label}; see {one.log.name}")
            return TRY_AGAIN
        else:
            path = self.work.log(one.cell)
            failures.append(Failure(one.cell, code or 1, path, _reason(path, one.begin)))
            say(f"FAILED with {code} after {seconds:,.0f} s: {one.cell.label}; see {path}")
            return code or 1
        return code

    def _stop(self, running: list[_Running]) -> list[Cell]:
        """Asks processes to save and end, kills those that do not; returns their cells that are not finished."""
        for one in running:
            one.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for one in running:
            try:
                one.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"killed after {GRACE_S:.0f} s: {one.cell.label} goes on from its last checkpoint")
                one.process.kill()
                one.process.wait()
            one.log.close()
        return [one.cell for one in running if self.work.find(one.cell) is None]

    def _tell(self, running: list[_Running], num_finished: int, total: int) -> None:
        now = time.monotonic()
        parts = [f"{num_finished}/{total} finished"]
        for one in running:
            newest = _lines(self.work.log(one.cell), one.begin)[-1:]
            parts.append(", ".join([f"{one.cell.label} {now - one.started:,.0f} s", *newest]))
        say("; ".join(parts))

    @contextlib.contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the round as a time limit does."""

        def note(_number: int, _frame: Any) -> None:
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _with_before(cell: Cell) -> list[Cell]:
    """A cell and those it builds on, these first."""
    return [*(_with_before(cell.after) if cell.after is not None else []), cell]


def _lines(path: Path, begin: int) -> list[str]:
    """The last lines of a log, from `begin` on, cut to what fits on a screen."""
    if not path.exists():
        return []
    text = path.read_bytes()[begin:][-4000:].decode(errors="replace")
    return [line.strip()[:200] for line in text.split("\n") if line.strip()]


def _reason(path: Path, begin: int) -> str:
    """Why a process failed: an error of ours has its fix in the lines after it."""
    lines = _lines(path, begin)
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
