"""Runs a temporary Redis server for benches and tests, on a free port of the loopback address 127.0.0.1."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from pathlib import Path
from typing import Self

from tackboard.core.errors import UsageError
from tackboard.core.processes import Process

START_S = 20.0


class RedisServer:
    """A `redis-server` with its files in `folder`. `appendfsync` is a Redis setting; `off` disables all writes to
    disk."""

    def __init__(self, folder: Path, *, appendfsync: str = "off") -> None:
        if not RedisServer.is_installed():
            raise UsageError("redis-server is not installed", fix="apt-get install redis-server")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.folder = folder
        self._options = ["--appendonly", "no"]
        if appendfsync != "off":
            self._options = ["--appendonly", "yes", "--appendfsync", appendfsync]
        self.start()

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts the server and waits until it answers. May be called again after `kill`."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self._process = Process([*command, "--save", "", *self._options], own_group=False)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(0.01)
        self.kill()
        raise UsageError(f"redis-server did not answer within {START_S:.0f} s")

    def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
