"""Runs one piece of work at a time in a thread, beside training.

`start` begins a piece of work and returns at once; it first waits for the former one. An error of the work is raised in
the thread of the caller, at the next `start` or `wait`, once. Decided: the thread is a daemon, so a user who stops a
run for the second time does not wait for a large file. Such a stop leaves an unfinished temporary folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """At most one piece of work in flight."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread. Waits for the former work and raises its error, if it had one."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the thread that trains must hear of it.
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the work is done. Raises its error, if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
