"""Runs the process that parses large bodies. It gets a `Body` through a socket and returns a `Parsed` or a refusal.

    python -m tackboard.serve.parser_process FD        `ParserProcess` starts this; FD is its end of the socket

Decided: one process, started with the server, reads one body at a time. So parsing takes at most one core and the
memory of one body. One `Admission` decides which bodies may wait; another one decides which requests may wait for the
model. The process imports neither torch nor Arrow, ignores the signals that stop a server (the server drains first),
and ends when the socket closes; the kernel closes the socket even if the server is killed. If the process dies or
hangs, one request fails and the next request starts another process. Pickle is safe here: only the server and this
process hold the socket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from tackboard.core.processes import Process
from tackboard.serve.admission import describe_error
from tackboard.serve.errors import RequestError
from tackboard.serve.parsing import Body, Parsed, RequestParser

# After this many seconds the process counts as suspended or broken. A body within the limits needs less than 6 s.
_STUCK_S = 60


class ParserProcess:
    """A process that parses bodies as `parser` does. `parse` is called by one thread at a time."""

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._process: Process | None = None
        self._connection: Connection | None = None
        self._in_use = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process without waiting until it is ready. If the start fails, the first `parse` tries again."""
        with self._in_use, contextlib.suppress(OSError):
            self._connect()

    def parse(self, body: Body) -> Parsed:
        """Does the same as `RequestParser.parse`, but empties `body`. Raises 500 if the process dies or hangs."""
        with self._in_use:
            try:
                connection = self._connect()
                _send(connection, body)
                found: Parsed | tuple[int, str] = connection.recv()
            except (OSError, EOFError):
                self._end()
                raise RequestError(500, "the server could not read this request; try again") from None
        if isinstance(found, Parsed):
            return found
        raise RequestError(*found)

    def stop(self) -> None:
        """Ends the process; a `parse` that waits for it fails."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()
        with self._in_use:
            self._end()

    def _connect(self) -> Connection:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._connection is None:
            if self._stopped:
                raise EOFError
            self._connection = self._spawn()
            self._connection.send(self._parser)
        return self._connection

    def _spawn(self) -> Connection:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STUCK_S, 0))
            # The child gets our import path without the current folder, which may hold any code. NumPy uses one thread.
            path = os.pathsep.join(filter(None, sys.path))
            self._process = Process(
                [sys.executable, "-P", "-m", "tackboard.serve.parser_process", str(theirs.fileno())],
                environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                own_group=False,
                keep_open=[theirs.fileno()],
            )
            return Connection(ours.detach())

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
        self._connection = self._process = None


def serve_parser(connection: Connection) -> None:
    """Answers bodies until the other end closes; the first message is the `RequestParser`."""
    with contextlib.suppress(EOFError, OSError):
        parser = connection.recv()
        while True:
            # No variable holds the body here. Otherwise the body's memory would be kept until the next body comes.
            connection.send(_answer(parser, _receive(connection)))
            gc.collect()


def _send(connection: Connection, body: Body) -> None:
    connection.send((body.encoding, body.header_length))
    # If the client goes away, the event loop may empty `chunks` during this loop. Then nobody reads the answer.
    with contextlib.suppress(IndexError):
        while True:
            if chunk := body.chunks.pop(0):
                connection.send_bytes(chunk)
    connection.send_bytes(b"")


def _receive(connection: Connection) -> Body:
    encoding, header_length = connection.recv()
    return Body([b"".join(iter(connection.recv_bytes, b""))], encoding, header_length)


def _answer(parser: RequestParser, body: Body) -> Any:
    try:
        return parser.parse(body)
    except RequestError as error:
        return error.status, error.message
    except Exception as error:  # noqa: BLE001 - a bug of ours; the answer names its place, but not the request
        return 500, f"the server failed on this request: {describe_error(error)}"


def main() -> None:
    """Runs the process; its only argument is the file descriptor of its end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The garbage collector would visit half a million new lists again and again. Here it runs once after each body, and
    # ignores imported objects.
    gc.freeze()
    gc.disable()
    with Connection(int(sys.argv[1])) as connection:
        serve_parser(connection)


if __name__ == "__main__":
    main()
