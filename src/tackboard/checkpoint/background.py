"""Runs one piece of work at a time in a thread while training goes on.

`start` waits for the previous piece of work, begins a new one and returns. If the work raises an error, the next
`start` or `wait` raises this error once in the caller's thread. Decided: the thread is a daemon, so a large file
never delays the end of the process if a user interrupts the run a second time. In that case an unfinished temporary
folder is left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs at most one piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread. First waits for the previous work and raises its error, if it had one."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the training thread.
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
