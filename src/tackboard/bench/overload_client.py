"""The clients of `tackboard bench overload` send requests at a fixed mean rate, even if the server is too slow.

    python -m tackboard.bench.overload_client PORT FILE RATE SECONDS DEADLINE_MS SEED

PORT is the port of a server on this machine. FILE holds complete HTTP requests, as a JSON list of base64 texts. RATE is
in requests per second, and SEED decides the arrival times. Only answers within a time window of SECONDS seconds count.
The last line of the output is one JSON object about the answers. Decided: arrivals are a Poisson process that does not
wait for answers, and a latency counts from the instant at which the request was due. So a slow server cannot hide its
delay by slowing down the clients. The window begins after `WARM_S` seconds of the same load, and the load lasts until
the window ends. So neither an empty queue at the start nor a pause at the end flatters the server. All clients share
one thread and send ready-made requests over raw sockets, because on a small machine clients take CPU time from the
server.
"""

from __future__ import annotations

import base64
import json
import random
import selectors
import socket
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

WARM_S = 0.5
"""Seconds of load before the window."""
MAX_CONNECTIONS = 240
"""Largest number of connections. If all of them are in use, a due request waits, and its latency includes the wait."""
_HEADER_END = b"\r\n\r\n"


class _Connection:
    """One kept-alive connection with at most one open request. `due_s` is the time at which the request was due."""

    __slots__ = ("due_s", "received", "socket", "unsent")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.received = bytearray()
        self.unsent = b""
        self.due_s = 0.0


class Clients:
    """Sends `requests` in turn to a server and records the answers. `run` may be called once."""

    def __init__(self, port: int, requests: list[bytes], deadline_s: float, seed: int) -> None:
        self._port = port
        self._requests = requests
        self._deadline_s = deadline_s
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self._num_connections = 0
        self._num_sent = 0
        self._due: deque[float] = deque()
        self._begins_s = self._ends_s = 0.0
        self._outcomes: Counter[str] = Counter()
        self._latencies_ms: list[float] = []
        self._refused_after_ms: list[float] = []
        self._late_starts_ms: list[float] = []

    def run(self, rate_per_s: float, seconds: float) -> dict[str, Any]:
        """Sends `rate_per_s` requests per second for WARM_S + `seconds`. Answers count only in the last `seconds`."""
        cpu_s = time.process_time()
        now = started = time.perf_counter()
        self._begins_s = started + WARM_S
        self._ends_s = self._begins_s + seconds
        next_s = started + self._random.expovariate(rate_per_s)
        while now < self._ends_s:
            while next_s <= now:
                self._due.append(next_s)
                next_s += self._random.expovariate(rate_per_s)
            while self._due and (connection := self._free_connection()) is not None:
                self._send(connection, self._due.popleft())
            now = time.perf_counter()
            for key, events in self._selector.select(max(0.0, min(next_s, self._ends_s) - now)):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
            now = time.perf_counter()
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()
        return {
            "seconds": seconds,
            "outcomes": dict(self._outcomes),
            "latencies_ms": self._latencies_ms,
            "refused_after_ms": self._refused_after_ms,
            "late_starts_ms": self._late_starts_ms,
            "num_connections": self._num_connections,
            "cpu_share": (time.process_time() - cpu_s) / (time.perf_counter() - started),
        }

    def _free_connection(self) -> _Connection | None:
        if self._idle:
            return self._idle.pop()
        if self._num_connections >= MAX_CONNECTIONS:
            return None
        try:
            connection = _Connection(self._port)
        except OSError:
            # The server or this machine accepts no more connections. The loop in `run` tries the request again.
            self._note("not_connected", 0.0)
            return None
        self._num_connections += 1
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def _send(self, connection: _Connection, due_s: float) -> None:
        connection.due_s = due_s
        connection.unsent = self._requests[self._num_sent % len(self._requests)]
        self._num_sent += 1
        self._late_starts_ms.append((time.perf_counter() - due_s) * 1000)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            num_sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._drop(connection)
            return
        connection.unsent = connection.unsent[num_sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        received = connection.received
        received += data
        end = received.find(_HEADER_END)
        if end < 0 or len(received) < end + len(_HEADER_END) + _content_length(received[:end]):
            return
        self._note(received[9:12].decode(), time.perf_counter() - connection.due_s)
        received.clear()
        connection.due_s = 0.0
        self._idle.append(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.due_s:
            self._note("closed", time.perf_counter() - connection.due_s)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._num_connections -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def _note(self, status: str, latency_s: float) -> None:
        if not self._begins_s <= time.perf_counter() <= self._ends_s:
            return
        if status == "200":
            self._latencies_ms.append(latency_s * 1000)
            status = "in_time" if latency_s <= self._deadline_s else "late"
        else:
            self._refused_after_ms.append(latency_s * 1000)
        self._outcomes[status] += 1


def _content_length(head: bytearray) -> int:
    for line in bytes(head).lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


if __name__ == "__main__":
    _port, _rate, _seconds, _deadline_ms, _seed = (float(word) for word in (sys.argv[1], *sys.argv[3:7]))
    _bodies = [base64.b64decode(text) for text in json.loads(Path(sys.argv[2]).read_text())]
    _clients = Clients(int(_port), _bodies, _deadline_ms / 1000, int(_seed))
    print(json.dumps(_clients.run(_rate, _seconds)))  # noqa: T201
