"""Accepts connections on the listening socket and makes one protocol object for each connection.

asyncio writes a traceback for a failed `accept`, and then stops listening for one second if resources ran out. Here a
failure is counted, and logged at most once a second. If descriptors or memory ran out, the least useful connection is
dropped. If the process itself had run out of descriptors, the drop is sure to help, and the next `accept` follows at
once. After any other failure, listening stops for a moment while established clients are served. Decided: each turn of
the event loop accepts one connection. So a flood of connections does not delay the answers to other clients, and
`accept` is called only if a client waits. Without a waiting client, `accept` could still fail on Linux for lack of
descriptors, and a connection would be dropped for nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable

_BACKLOG = 2048
_PAUSE_S = 0.1
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("tackboard.serve")


class Listener:
    """Accepts connections on a bound socket from `start` to `stop`, both called on the event loop.

    `drop_one` drops a connection to free its descriptor, and returns False if no connection can be dropped. `on_error`
    counts a failed `accept`.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        drop_one: Callable[[], bool],
        on_error: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._drop_one = drop_one
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._num_errors = 0
        self._logged_s = float("-inf")

    def start(self) -> None:
        """Begins to listen. Raises OSError if the socket cannot listen."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._watch()

    def stop(self) -> None:
        """Accepts nothing more. The socket stays open."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _watch(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._failed(error)
            return
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, client))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _failed(self, error: OSError) -> None:
        self._num_errors += 1
        self._on_error()
        now_s = time.monotonic()
        if now_s >= self._logged_s + 1:
            self._logged_s = now_s
            reason = os.strerror(error.errno or 0)
            logger.warning("cannot accept a connection: %s (%d times since the start)", reason, self._num_errors)
        dropped = error.errno in _LACKS and self._drop_one()
        # A dropped connection is closed before the next turn, and then this process can use its descriptor again.
        if error.errno != errno.EMFILE or not dropped:
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._watch)
