"""Clients that take connections and give nothing back: others are served, and the server's health is known.

The server runs in a process of its own. Clients bind 127.0.0.2, 127.0.0.3 and so on, so that they are several to it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).with_name("gated_server.py")
INFER = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
TENSOR = {"name": "history_item", "datatype": "INT64", "shape": [0], "data": []}
BODY = json.dumps(
    {"inputs": [TENSOR, {"name": "candidate_item", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}
).encode()
ROUNDS = (b"", b"GET /v2 HTTP/1.1\r\nHost", INFER + b"Content-Length: 1000\r\n\r\n{")


class Attacked:
    """A server process, ways to talk to it, and what it wrote to standard error."""

    def __init__(self, folder: Path, num_files: int | None, limits: dict[str, Any]) -> None:
        self.errors = folder / "stderr"

        def lower_limit() -> None:
            if num_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), json.dumps(limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                preexec_fn=lower_limit,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline() or 0)
        assert self.port, self.errors.read_text()

    def tell(self, line: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def connect(self, source: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(source, 0))

    def client(self, source: str = "127.0.0.1") -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20, source_address=(source, 0))

    def call(self, method: str, path: str, body: bytes | None = None, source: str = "127.0.0.1") -> tuple[int, bytes]:
        client = self.client(source)
        try:
            client.request(method, path, body=body)
            response = client.getresponse()
            return response.status, response.read()
        finally:
            client.close()

    def infer(self, source: str = "127.0.0.1") -> int:
        return self.call("POST", "/v2/models/m/infer", BODY, source)[0]

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.call("GET", "/metrics")[1].decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def end(self) -> None:
        with suppress(OSError):
            self.process.communicate("stop\n", timeout=20)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Callable[..., Attacked]]:
    started: list[Attacked] = []

    def start(num_files: int | None = None, **limits: Any) -> Attacked:
        started.append(Attacked(tmp_path, num_files, limits))
        return started[-1]

    yield start
    for attacked in started:
        attacked.end()
        assert attacked.process.returncode == 0
        assert "Traceback" not in attacked.errors.read_text()


def hold_slowly(attacked: Attacked, stack: ExitStack, source: str, count: int) -> None:
    """Opens connections of which a third is silent, a third in its headers and a third in its body."""
    for number in range(count):
        client = stack.enter_context(attacked.connect(source))
        with suppress(OSError):  # The server may have dropped it by now.
            client.sendall(ROUNDS[number % 3])


def assert_everybody_is_served(attacked: Attacked, *sources: str) -> None:
    for source in sources:
        assert attacked.infer(source) == 200
        for path in ("live", "ready"):
            assert attacked.call("GET", f"/v2/health/{path}", source=source)[0] == 200


def test_slow_connections_of_one_client_do_not_lock_others_out(attack: Callable[..., Attacked]) -> None:
    attacked = attack()
    established = attacked.client()
    established.request("GET", "/v2")
    assert established.getresponse().read()
    with ExitStack() as stack:
        hold_slowly(attacked, stack, "127.0.0.2", 600)
        # The attacker's own address is served too: its slow connections make room for its newcomers.
        assert_everybody_is_served(attacked, "127.0.0.1", "127.0.0.3", "127.0.0.2")
        established.request("GET", "/v2")
        assert established.getresponse().status == 200
        assert attacked.metric('tackboard_connections_closed_total{reason="made_room"}') >= 600 - 256
        assert attacked.metric('tackboard_shed_total{reason="connections"}') == 0
    established.close()


def test_slow_connections_of_many_clients_make_room(attack: Callable[..., Attacked]) -> None:
    attacked = attack()
    established = attacked.client()
    established.request("GET", "/v2")
    assert established.getresponse().read()
    with ExitStack() as stack:
        for last in range(2, 10):
            hold_slowly(attacked, stack, f"127.0.0.{last}", 100)
        assert_everybody_is_served(attacked, "127.0.0.1", "127.0.0.2", "127.0.0.99")
        established.request("GET", "/v2")
        assert established.getresponse().status == 200
    established.close()


def test_health_answers_while_every_connection_is_busy(attack: Callable[..., Attacked]) -> None:
    attacked = attack(max_connections=8, max_connections_per_address=4)
    attacked.tell("hold")
    request = INFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with ExitStack() as stack:
        busy = [stack.enter_context(attacked.connect(f"127.0.0.{2 + number % 2}")) for number in range(8)]
        for client in busy:
            client.sendall(request)
        while attacked.tell("count") < len(busy):
            time.sleep(0.01)
        # Slow newcomers of several addresses fill the reserve as well.
        for last in range(2, 6):
            hold_slowly(attacked, stack, f"127.0.0.{last}", 40)
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.5"):
            for path in ("live", "ready"):
                status, body = attacked.call("GET", f"/v2/health/{path}", source=source)
                assert (status, json.loads(body)) == (200, {"live": True, "ready": True})
            assert attacked.infer(source) == 429
        attacked.tell("go")
        for client in busy:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert_everybody_is_served(attacked, "127.0.0.1")


def flood(attacked: Attacked, established: http.client.HTTPConnection, source: str, count: int) -> int:
    """Opens and forgets connections, 500 held at a time; the established client asks all the while."""
    num_answers, held = 0, []
    for number in range(count):
        client = socket.socket()
        client.bind((source, 0))
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", attacked.port))
        held.append(client)
        if len(held) > 500:
            held.pop(0).close()
        if number % 50 == 0:
            established.request("GET", "/v2/health/live")
            response = established.getresponse()
            assert (response.status, response.read()) == (200, b'{"live":true,"ready":true}')
            num_answers += 1
    for client in held:
        client.close()
    return num_answers


def test_a_flood_at_a_low_limit_of_descriptors(attack: Callable[..., Attacked]) -> None:
    """There are fewer connections than descriptors, so none is missing."""
    attacked = attack(num_files=64)
    established = attacked.client()
    assert flood(attacked, established, "127.0.0.2", 2000) == 40
    established.close()
    assert attacked.metric("tackboard_accept_errors_total") == 0
    assert_everybody_is_served(attacked, "127.0.0.1", "127.0.0.2")
    assert re.fullmatch(
        r"at most \d+ connections are served: the limit of open files is 64; raise it with ulimit -n\n",
        attacked.errors.read_text(),
    )


def test_accept_errors_are_counted_and_outlived(attack: Callable[..., Attacked]) -> None:
    """The limit of descriptors is lowered behind the server's back."""
    attacked = attack()
    established = attacked.client()
    assert flood(attacked, established, "127.0.0.2", 1) == 1
    attacked.tell("files 40")
    started = time.monotonic()
    assert flood(attacked, established, "127.0.0.2", 2000) == 40
    assert_everybody_is_served(attacked, "127.0.0.1", "127.0.0.3")
    lasted_s = time.monotonic() - started
    attacked.tell("files 1000")
    assert_everybody_is_served(attacked, "127.0.0.1", "127.0.0.2")
    established.close()
    assert attacked.metric("tackboard_accept_errors_total") > 0
    lines = attacked.errors.read_text().splitlines()
    told = [line for line in lines if re.search(r"cannot accept a connection: Too many open files \(\d+ times", line)]
    assert 1 <= len(told) <= lasted_s + 2
    assert len(lines) == len(told), lines[:10]


def test_no_descriptor_at_all_until_some_are_free(attack: Callable[..., Attacked]) -> None:
    """Every connection is busy, so none can be dropped; a newcomer waits and is served later."""
    attacked = attack()
    attacked.tell("hold")
    request = INFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with ExitStack() as stack:
        busy = [stack.enter_context(attacked.connect("127.0.0.2")) for _ in range(30)]
        for client in busy:
            client.sendall(request)
        while attacked.tell("count") < len(busy):
            time.sleep(0.01)
        attacked.tell("files 20")
        late = stack.enter_context(attacked.connect("127.0.0.3"))
        late.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        late.settimeout(0.5)
        with pytest.raises(TimeoutError):
            late.recv(1)
        attacked.tell("go")
        for client in busy:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            client.close()
        late.settimeout(20)
        assert late.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert attacked.metric("tackboard_accept_errors_total") >= 1
