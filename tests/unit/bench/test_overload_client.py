"""The clients of the overload bench against a server of a few lines on a real socket."""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tackboard.bench import overload_client
from tackboard.bench.overload_client import Clients

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


class Answers(socketserver.BaseRequestHandler):
    """Answers whole requests; by the server's `mode` at once, late, in two pieces, with 429, or by hanging up."""

    def handle(self) -> None:
        # The clients end at the end of their window, whether or not an answer is on its way.
        with suppress(OSError):
            self.answer()

    def answer(self) -> None:
        while data := self.request.recv(len(REQUEST), socket.MSG_WAITALL):
            assert data == REQUEST
            mode = self.server.mode  # type: ignore[attr-defined]
            if mode == "closed":
                return
            if mode == "late":
                time.sleep(0.06)
            answer = BUSY if mode == "busy" else GOOD
            self.request.sendall(answer[:10])
            self.request.sendall(answer[10:])


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("mode", "outcome"), [("good", "in_time"), ("late", "late"), ("busy", "429"), ("closed", "closed")]
)
def test_every_outcome_is_told_apart(
    server: socketserver.ThreadingTCPServer, monkeypatch: pytest.MonkeyPatch, mode: str, outcome: str
) -> None:
    monkeypatch.setattr(overload_client, "WARM_S", 0.05)
    server.mode = mode  # type: ignore[attr-defined]
    # A busy machine makes any answer slow, so the deadline is far away unless being late is the point.
    deadline_s = 0.05 if mode == "late" else 30.0
    found = Clients(server.server_address[1], [REQUEST], deadline_s, seed=1).run(100.0, 0.3)
    assert set(found["outcomes"]) == {outcome}
    assert len(found["latencies_ms"]) == sum(found["outcomes"].get(name, 0) for name in ("in_time", "late"))
    assert 0 < found["cpu_share"] < 1.5


def test_latency_counts_from_when_a_request_was_due(
    server: socketserver.ThreadingTCPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection and a server that takes 60 ms: at 100 requests per second they wait ever longer for their turn."""
    monkeypatch.setattr(overload_client, "WARM_S", 0.2)
    monkeypatch.setattr(overload_client, "MAX_CONNECTIONS", 1)
    server.mode = "late"  # type: ignore[attr-defined]
    found = Clients(server.server_address[1], [REQUEST], 0.05, seed=1).run(100.0, 0.5)
    assert found["num_connections"] == 1
    assert min(found["latencies_ms"]) > 100
    assert max(found["latencies_ms"]) > 300


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload_client, "WARM_S", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        found = Clients(closed.getsockname()[1], [REQUEST], 1.0, seed=1).run(100.0, 0.1)
    assert set(found["outcomes"]) == {"not_connected"}


def test_the_program(server: socketserver.ThreadingTCPServer, tmp_path: Path) -> None:
    server.mode = "good"  # type: ignore[attr-defined]
    (tmp_path / "requests.json").write_text(json.dumps([base64.b64encode(REQUEST).decode()]))
    words = [str(server.server_address[1]), str(tmp_path / "requests.json"), "50", "0.2", "30000", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "tackboard.bench.overload_client", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["outcomes"]) == {"in_time"}
