"""Shows the progress of a pipeline: one line per finished stage and, on a terminal, a live line for the running stage.

Everything goes to stderr, so that stdout holds only the JSON object that `--json` prints.
"""

import sys
import time
from typing import Any, Self

from tackboard.core.progress import say


class Display:
    """Shows the stages of one pipeline. Use it as a context manager around all stages."""

    def __init__(self, num_stages: int, *, live: bool | None = None) -> None:
        self.num_stages = num_stages
        self.live = sys.stderr.isatty() if live is None else live
        self.index = 0
        self._name = ""
        self._started = time.monotonic()
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self.live:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, name: str) -> None:
        self.index += 1
        self._name = name
        self._started = time.monotonic()
        if self._progress is not None:
            self._task = self._progress.add_task(self._label(), total=None, note="")

    def update(self, done: float | None = None, total: float | None = None, note: str | None = None) -> None:
        """Shows the progress of the stage, but only on a terminal."""
        if self._progress is not None:
            changes = {"completed": done, "total": total, "note": note}
            self._progress.update(self._task, **{key: value for key, value in changes.items() if value is not None})

    def end(self, outcome: str) -> None:
        """Ends the stage; `outcome` is its result in a few words."""
        line = f"{self._label()}  {time.monotonic() - self._started:6.1f} s  {outcome}"
        if self._progress is not None:
            # A plain line replaces the live line. A narrow terminal cuts a live line, but only wraps a plain line.
            self._progress.remove_task(self._task)
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            say(line)

    def _label(self) -> str:
        return f"[{self.index:>{len(str(self.num_stages))}}/{self.num_stages}] {self._name:<13}"
