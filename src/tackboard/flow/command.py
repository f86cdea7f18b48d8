"""Runs one command of a pipeline as a user would type it, measures it, and leaves none of its processes running.

A command is given as the words after `tackboard`. The result holds the last JSON line, the wall and CPU seconds and the
peak resident memory of the command. The command prints everything to one log file. Decided: whatever ends the pipeline
(success, an error, Ctrl-C, SIGTERM, a closed terminal) also ends the command and all its child processes.
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tackboard.core.errors import EXIT_BUG, TackboardError, one_line
from tackboard.core.processes import POLL_S, Process, last_json_object
from tackboard.core.progress import say

PROGRAM = (sys.executable, "-m", "tackboard")
"""The start of every command. It uses the same Python as this process, so a pipeline never mixes two installations."""
NUM_TAIL_LINES = 15


class StageError(TackboardError):
    """A command of the pipeline failed. The error has the exit code of the command."""

    def __init__(self, got: str, *, allowed: str = "", fix: str = "", exit_code: int = EXIT_BUG) -> None:
        super().__init__(got, allowed=allowed, fix=fix)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The result and the cost of one command."""

    name: str
    arguments: tuple[str, ...]
    answer: dict[str, Any]
    """The last line of JSON that the command printed; empty if there is none."""
    seconds: float
    cpu_seconds: float
    """User and system time of the command and of all processes that it started."""
    peak_rss_bytes: int

    def require(self, key: str) -> Any:
        """Returns a value of the answer. Raises StageError if the answer does not have the key."""
        if key not in self.answer:
            raise StageError(
                f"`{typed(self.arguments)}` answered without {key!r}", allowed=f"it gave {sorted(self.answer)}"
            )
        return self.answer[key]


class Command(Process):
    """A running `tackboard` command. Leaving its `with` block ends the whole process group."""

    def __init__(self, arguments: Sequence[str], log: Path, *, program: Sequence[str] | None = None) -> None:
        self.arguments = tuple(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {typed(arguments)}\n")
        super().__init__([*(program or PROGRAM), *arguments], log=log, sample_memory=True)

    def finished(self, name: str) -> Finished:
        """Returns the result and the cost of the command, after it has ended."""
        return Finished(
            name=name,
            arguments=self.arguments,
            answer=last_json_object(self.printed()),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds(),
            peak_rss_bytes=self.peak_rss_bytes,
        )

    def failure(self, name: str) -> StageError:
        """Prints the end of the log and returns the error of a command that ended with a code other than 0."""
        code = self.code or EXIT_BUG
        lines = self.printed().splitlines()[-NUM_TAIL_LINES:]
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


def run_command(
    name: str,
    arguments: Sequence[str],
    *,
    log: Path,
    watch: Callable[[], None] | None = None,
    program: Sequence[str] | None = None,
) -> Finished:
    """Runs one command to its end and calls `watch` meanwhile. Raises StageError for an exit code other than 0.

    `program` takes the place of PROGRAM: a launcher can start the command in several processes.
    """
    with Command(arguments, log, program=program) as command:
        while (code := command.poll()) is None:
            if watch is not None:
                watch()
            time.sleep(POLL_S)
        if code != 0:
            raise command.failure(name)
        return command.finished(name)


def typed(arguments: Sequence[str]) -> str:
    """Returns the command as a user types it."""
    return shlex.join(["tackboard", *arguments])
