"""One connection against its limits, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tackboard.core.errors import ConfigError
from tackboard.serve.connection import ConnectionLimits

Start = Callable[..., Any]
FAST = ConnectionLimits(header_deadline_s=0.3, body_deadline_s=0.3, idle_timeout_s=0.3, max_connections=4)
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"


def talk(port: int, *parts: bytes, pause_s: float = 0.0, wait_s: float = 5.0) -> bytes:
    """Sends the parts and returns everything the server says until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as client:
        received = b""
        try:
            for part in parts:
                client.sendall(part)
                if pause_s:
                    time.sleep(pause_s)
            while chunk := client.recv(65536):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            return received
        return received


def test_a_silent_connection_is_closed(start_server: Start) -> None:
    started = time.monotonic()
    assert talk(start_server(connection=FAST).port) == b""
    assert 0.2 < time.monotonic() - started < 2


def test_late_headers_get_408(start_server: Start) -> None:
    answer = talk(start_server(connection=FAST).port, GET)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1]) == {"error": "the headers did not arrive in time"}


def test_a_byte_now_and_then_does_not_help(start_server: Start) -> None:
    parts = [GET[position : position + 1] for position in range(8)]
    started = time.monotonic()
    talk(start_server(connection=FAST).port, *parts, pause_s=0.1)
    assert time.monotonic() - started < 2


def test_a_late_body_gets_408(start_server: Start) -> None:
    running = start_server(connection=FAST)
    answer = talk(running.port, b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'closed_total{reason="body_deadline"} 1.0' in running.call("GET", "/metrics")[1]


def test_an_idle_connection_is_closed(start_server: Start) -> None:
    answer = talk(start_server(connection=FAST).port, GET + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"live":true,"ready":true}')


@pytest.mark.parametrize(
    "header",
    [b"X: " + b"a" * 200_000, b"\r\n".join(b"X-%d: a" % number for number in range(150))],
)
def test_large_headers_get_431(start_server: Start, header: bytes) -> None:
    answer = talk(start_server().port, GET + header + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def test_a_large_header_in_pieces_is_cut_before_its_end(start_server: Start) -> None:
    pieces = [b"a" * 8192 for _ in range(20)]
    answer = talk(start_server().port, GET + b"X: ", *pieces, pause_s=0.002)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def test_a_long_path_gets_431(start_server: Start) -> None:
    answer = talk(start_server().port, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def test_what_is_not_http_gets_400(start_server: Start) -> None:
    answer = talk(start_server().port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":"the request is not valid HTTP"}' in answer


def test_both_lengths_at_once_are_refused(start_server: Start) -> None:
    head = (
        b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert talk(start_server().port, head + b"0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_tiny_chunks_are_refused(start_server: Start) -> None:
    running = start_server()
    head = b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    talk(running.port, head + b"1\r\na\r\n" * 5000)
    assert b'closed_total{reason="chunk_size"} 1.0' in running.call("GET", "/metrics")[1]


def test_endless_pipelining_is_refused(start_server: Start) -> None:
    running = start_server()
    running.scorer.gate.clear()
    talk(running.port, (GET + b"\r\n") * 100)
    assert b'closed_total{reason="pipeline"} 1.0' in running.call("GET", "/metrics")[1]


def test_connections_are_counted(start_server: Start) -> None:
    running = start_server(connection=ConnectionLimits(max_connections=2))
    held = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
    try:
        time.sleep(0.05)
        assert talk(running.port).startswith(b"HTTP/1.1 503 ")
    finally:
        for connection in held:
            connection.close()
    time.sleep(0.05)
    assert running.call("GET", "/v2/health/live")[0] == 200


def test_an_upgrade_is_ignored(start_server: Start) -> None:
    answer = talk(start_server(connection=FAST).port, GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_is_read_so_that_the_answer_arrives(start_server: Start) -> None:
    running = start_server(connection=ConnectionLimits(max_body_bytes=1 << 20))
    status, answer, _ = running.call("POST", "/nope", bytes(1 << 20))
    assert (status, list(answer)) == (404, ["error"])


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="body_deadline_s"):
        ConnectionLimits(body_deadline_s=0)
