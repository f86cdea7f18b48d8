"""Shows the progress of long work: a bar on a terminal, plain lines in a log.

If several processes train one model, only process 0 prints progress and other lines. The others print only errors.

Decided: if stderr is not a terminal, nothing is drawn with carriage returns. While the work advances, a line is printed
at most every `LOG_EVERY_S` seconds. One more line is printed when the work ends.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any, Self

from tackboard.core.errors import TackboardError

LOG_EVERY_S = 15.0


@dataclasses.dataclass(frozen=True)
class _Speaker:
    """This process's number among the processes of a run, and whether it is the first process of its host."""

    rank: int = 0
    is_first_on_host: bool = True


_speaker = _Speaker()


def speak_as(rank: int, *, is_first_on_host: bool) -> None:
    """Tells this module that this process is number `rank` of the processes of a run."""
    global _speaker
    _speaker = _Speaker(rank, is_first_on_host)


def say(line: str) -> None:
    """Prints one line to stderr and flushes it. Only process 0 of a run does so."""
    if _speaker.rank == 0:
        print(line, file=sys.stderr, flush=True)


def complain(error: BaseException, text: str) -> None:
    """Prints the text of an error to stderr. A process other than 0 puts its number before the text.

    An error that all processes raise with the same words is printed by the first process of each host.
    """
    if isinstance(error, TackboardError) and error.is_common and not _speaker.is_first_on_host:
        return
    prefix = f"[process {_speaker.rank}] " if _speaker.rank else ""
    sys.stderr.write(f"{prefix}{text}\n")  # In one piece, because other processes write to the same place.
    sys.stderr.flush()


class Progress:
    """Shows progress: `with Progress("reading", total=n, unit="rows") as progress: progress.advance(k)`.

    `note` (for example a loss) is shown after the count. If `total` is None, the count is shown without a total.
    """

    def __init__(self, title: str, *, total: int | None = None, unit: str = "", quiet: bool = False) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.quiet = quiet or _speaker.rank > 0
        self.done = 0
        self.note = ""
        self._bar: Any = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            self._bar = _terminal_bar()
            self._task = self._bar.add_task(self.title, total=self.total, unit=self.unit, note="")
            self._bar.start()
        return self

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Adds `count` to the work done, and replaces the note if `note` is given."""
        self.done += count
        self.note = self.note if note is None else note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=self.note)
        elif not self.quiet and self.done != self.total and time.monotonic() - self._last_line >= LOG_EVERY_S:
            self._last_line = time.monotonic()
            say(self._line())

    def __exit__(self, kind: type[BaseException] | None, *_more: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self.quiet:
            say(self._line() + (" (interrupted)" if kind else ""))

    def _line(self) -> str:
        total = f"/{self.total:,}" if self.total else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.title}: {self.done:,}{total} {self.unit}{note}, {time.monotonic() - self._started:.1f} s"


def _terminal_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]} {task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
