"""One connection against its limits, over real sockets."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tackboard.serve.admission import AdmissionConfig
from tackboard.serve.connection import ConnectionLimits, address_of

Start = Callable[..., Any]
FAST = ConnectionLimits(header_deadline_s=0.3, body_deadline_s=0.3, idle_timeout_s=0.3, max_connections=4)
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
INFER = b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\n"
PATIENT = AdmissionConfig(timeout_ms=8000)


def connect(port: int, source: str = "127.0.0.1", wait_s: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=wait_s, source_address=(source, 0))


def read_all(client: socket.socket) -> bytes:
    """Everything the server says until it closes."""
    received = b""
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionResetError:
        return received
    return received


def read_answer(client: socket.socket) -> bytes:
    """One answer with a body of JSON, on a connection that may stay open."""
    received = b""
    while not received.endswith(b"}") and (chunk := client.recv(65536)):
        received += chunk
    return received


def infer_bytes(body: Any) -> bytes:
    text = json.dumps(body).encode()
    return INFER + b"Content-Length: %d\r\n\r\n" % len(text) + text


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def talk(port: int, *parts: bytes, pause_s: float = 0.0, wait_s: float = 5.0) -> bytes:
    """Sends the parts and returns everything the server says until it closes."""
    with connect(port, wait_s=wait_s) as client:
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


def test_a_large_header_in_pieces_is_cut_before_its_end(start_server: Start) -> None:
    pieces = [b"a" * 8192 for _ in range(20)]
    answer = talk(start_server().port, GET + b"X: ", *pieces, pause_s=0.002)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


AMBIGUOUS = [
    b"GET /v2 HTTP/1.1\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: x\r\nHost: x\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: x\r\nhost: y\r\n",
    b"GET /v2 HTTP/1.0\r\nHost: x\r\nHost: y\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: a b\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: a/b\r\n",
    b"GET /v2 HTTP/2.0\r\nHost: x\r\n",
    b"GET /v2 HTTP/0.9\r\nHost: x\r\n",
    b"POST /v2 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n",
]
"""Headers that two servers may read in two ways."""


def test_headers_that_can_be_read_in_two_ways_get_400(start_server: Start) -> None:
    running = start_server()
    for head in AMBIGUOUS:
        answer = talk(running.port, head + b"\r\n0\r\n\r\n" + GET + b"\r\n")
        assert statuses(answer) == [400], head
        assert list(json.loads(answer.split(b"\r\n\r\n", 1)[1])) == ["error"]


ALLOWED = [
    b"GET /v2 HTTP/1.0\r\n",
    b"GET /v2 HTTP/1.1\r\nHost:\r\nConnection: close\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: my_host.example:80 \r\nConnection: close\r\nTransfer-Encoding: Chunked\r\n",
]


def test_headers_that_http_allows_are_served(start_server: Start) -> None:
    running = start_server()
    for head in ALLOWED:
        assert statuses(talk(running.port, head + b"\r\n0\r\n\r\n"))[0] == 200, head


def test_pipelined_requests_beyond_the_limit_are_told(start_server: Start, request_body: Any) -> None:
    """The first request holds up the others, so that none is answered before all have arrived."""
    running = start_server(admission=PATIENT)
    running.scorer.gate.clear()
    with connect(running.port) as client:
        client.sendall(infer_bytes(request_body([8])) + (GET + b"\r\n") * 99)
        while running.scorer.num_started == 0:
            time.sleep(0.005)
        running.scorer.gate.set()
        answer = read_all(client)
    assert statuses(answer) == [200] * 16 + [429]
    last = answer[answer.rindex(b"HTTP/1.1") :]
    assert b"retry-after: 1\r\n" in last
    assert json.loads(last.split(b"\r\n\r\n", 1)[1]) == {
        "error": "more than 16 requests of one connection are unanswered"
    }
    assert b'closed_total{reason="pipeline"} 1.0' in running.call("GET", "/metrics")[1]


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"no http at all\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (GET, 408),
        (INFER + b"Content-Length: 100\r\n\r\n{", 408),
        (INFER + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 2000, 400),
    ],
    ids=["malformed", "host", "size", "headers", "body", "chunks"],
)
def test_a_refusal_comes_after_the_answers_that_are_owed(
    start_server: Start, request_body: Any, bad: bytes, status: int
) -> None:
    running = start_server(admission=PATIENT, connection=FAST)
    running.scorer.gate.clear()
    with connect(running.port) as client:
        client.sendall(infer_bytes(request_body([8])) + GET + b"\r\n" + bad)
        time.sleep(0.5)  # longer than the deadlines
        running.scorer.gate.set()
        assert statuses(read_all(client)) == [200, 200, status]


def test_a_client_that_does_not_read_is_not_waited_for_for_ever(start_server: Start) -> None:
    """Answers fill the buffers; the next answer then waits for the client to read, which it never does."""
    running = start_server(connection=ConnectionLimits(idle_timeout_s=0.5))
    state = running.server._uvicorn.server_state
    ask = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.socket() as client, suppress(ConnectionResetError, BrokenPipeError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        for num_asked in range(1, 5000):
            client.sendall(ask)
            # On a busy machine the unread answers may be too old before the buffers are full.
            while state.total_requests < num_asked and state.connections:
                time.sleep(0.0005)
            if not state.connections or any(connection.flow.write_paused for connection in list(state.connections)):
                break
        client.sendall(ask * 2)
        ends = time.monotonic() + 5
        while state.connections and time.monotonic() < ends:
            time.sleep(0.01)
        assert not state.connections


def test_a_connection_is_closed_after_a_body_that_nobody_read(start_server: Start) -> None:
    running = start_server(connection=FAST)
    with connect(running.port) as client:
        client.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        answer = read_answer(client)
        client.sendall(b"{}")
        assert statuses(answer) == [404]
        assert read_all(client) == b""


def test_the_connection_that_waited_longest_makes_room(start_server: Start) -> None:
    """Four connections, then one more: the oldest goes, unless it has been used since."""
    running = start_server(connection=ConnectionLimits(max_connections=4))
    clients = []
    for _ in range(4):
        clients.append(connect(running.port))
        clients[-1].sendall(GET + b"\r\n")
        assert statuses(read_answer(clients[-1])) == [200]
    clients[0].sendall(GET + b"\r\n")
    assert statuses(read_answer(clients[0])) == [200]
    clients[2].sendall(INFER + b"Content-Length: 100\r\n\r\n{")
    time.sleep(0.1)
    for expected in (b"", b"", b"", b"HTTP/1.1 429 Too Many Requests"):
        # The order in which they go: 1 and 3 wait longest, then 0, then 2, whose request had begun to arrive.
        position = (1, 3, 0, 2)[len(clients) - 4]
        clients.append(connect(running.port))
        clients[-1].sendall(GET + b"\r\n")
        assert statuses(read_answer(clients[-1])) == [200]
        assert read_all(clients[position]).split(b"\r\n")[0] == expected
    for client in clients:
        client.close()
    assert b'closed_total{reason="made_room"} 4.0' in running.call("GET", "/metrics")[1]


def test_the_address_with_most_connections_makes_room(start_server: Start) -> None:
    running = start_server(connection=ConnectionLimits(max_connections=4))
    first = connect(running.port)
    first.sendall(GET + b"\r\n")
    assert statuses(read_answer(first)) == [200]
    many = [connect(running.port, "127.0.0.2") for _ in range(20)]
    for client in many[:-3]:
        assert statuses(read_all(client)) == [429]
    first.sendall(GET + b"\r\n")
    assert statuses(read_answer(first)) == [200]
    for client in (first, *many):
        client.close()


def test_a_request_that_is_computed_is_never_dropped(start_server: Start, request_body: Any) -> None:
    running = start_server(
        admission=PATIENT, connection=ConnectionLimits(max_connections=3, max_connections_per_address=2)
    )
    running.scorer.gate.clear()
    busy = [connect(running.port, f"127.0.0.{last}") for last in (1, 1, 2)]
    for client in busy:
        client.sendall(infer_bytes(request_body([8])))
    while running.scorer.num_started + running.server.admission.num_waiting < 3:
        time.sleep(0.005)
    for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        with connect(running.port, source) as client:
            client.sendall(infer_bytes(request_body([8])))
            answer = read_all(client)
        assert statuses(answer) == [429]
        assert b"retry-after: 1\r\n" in answer
        with connect(running.port, source) as client:
            client.sendall(GET + b"\r\n")
            assert statuses(read_all(client)) == [200]
    running.scorer.gate.set()
    assert [statuses(read_answer(client)) for client in busy] == [[200]] * 3
    for client in busy:
        client.close()
    metrics = running.call("GET", "/metrics")[1]
    assert b'shed_total{reason="connections"} 3.0' in metrics
    assert b'closed_total{reason="made_room"} 0.0' in metrics


def test_a_full_reserve_of_health_connections(start_server: Start, request_body: Any) -> None:
    """Silent connections fill the reserve, then clients that do not close; health is answered all the same."""
    limits = ConnectionLimits(max_connections=1, num_health_connections=2)
    running = start_server(admission=PATIENT, connection=limits)
    running.scorer.gate.clear()
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(running.infer(request_body([8]))[0]))
    asking.start()
    while running.scorer.num_started == 0:
        time.sleep(0.005)
    silent = [connect(running.port, "127.0.0.2") for _ in range(5)]
    assert [statuses(read_all(client)) for client in silent[:3]] == [[429]] * 3
    for path in ("live", "ready"):
        assert running.call("GET", f"/v2/health/{path}")[0] == 200
        assert running.call("HEAD", f"/v2/health/{path}")[0] == 200
    for method, path in (("GET", "/v2"), ("GET", "/metrics"), ("POST", "/v2/health/live"), ("GET", "/nope")):
        status, answer, headers = running.call(method, path)
        assert (status, answer) == (429, {"error": "there are too many connections; try again later"})
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
    started = time.monotonic()
    with connect(running.port) as late:
        assert read_all(late) == b""
    assert time.monotonic() - started < 4, "a silent connection has a second, not the ten of an ordinary one"
    running.scorer.gate.set()
    asking.join(5)
    assert answers == [200]
    for client in silent:
        client.close()
    assert running.call("GET", "/v2")[0] == 200


def test_a_crowd_leaves_nothing_behind(
    start_server: Start, request_body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of five addresses do good and bad things in random order; afterwards nobody is counted any more."""
    limits = ConnectionLimits(
        header_deadline_s=0.2,
        body_deadline_s=0.2,
        idle_timeout_s=0.2,
        max_connections=4,
        max_connections_per_address=2,
        num_health_connections=2,
    )
    running = start_server(connection=limits)
    good = infer_bytes(request_body([8]))
    messages = (GET + b"\r\n", good, good * 20, good[:-20], GET, b"?\r\n\r\n", b"GET /v2 HTTP/1.1\r\n\r\n", good + GET)
    chooser = random.Random(11)
    clients: list[socket.socket] = []
    for _ in range(1500):
        deed = chooser.random()
        if deed < 0.4 or not clients:
            clients.append(connect(running.port, f"127.0.0.{chooser.randint(1, 5)}"))
        elif deed < 0.8:
            with suppress(OSError):
                chooser.choice(clients).sendall(chooser.choice(messages))
        elif deed < 0.82:
            (running.scorer.gate.clear if running.scorer.gate.is_set() else running.scorer.gate.set)()
            time.sleep(0.03)
        elif deed < 0.91:
            clients.pop(chooser.randrange(len(clients))).close()
        else:
            client = clients.pop(chooser.randrange(len(clients)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # a reset
    running.scorer.gate.set()
    for client in clients:
        client.close()
    connections = running.server._uvicorn._connection.open
    ends = time.monotonic() + 5
    while running.server._uvicorn.server_state.connections and time.monotonic() < ends:
        time.sleep(0.01)
    assert (connections._num_inside, connections.reserve.num_inside, connections._by_address) == (0, 0, {})
    assert not connections.reserve.waiting
    assert running.server.app.num_in_flight == 0
    assert running.infer(request_body([8]))[0] == 200
    assert not [record for record in caplog.records if record.name == "asyncio" or record.exc_info]


def test_what_is_counted_as_one_client() -> None:
    assert address_of(("192.0.2.7", 5)) == address_of(("::ffff:192.0.2.7", 6)) == "192.0.2.7"
    assert address_of(("2001:db8::1", 5)) == address_of(("2001:db8::2:3", 5)) != address_of(("2001:db8:0:1::1", 5))
    assert address_of(("fe80::1%eth0", 5)) == "fe80:0000:0000:0000"
    assert address_of(None) == ""


def test_an_upgrade_is_ignored(start_server: Start) -> None:
    answer = talk(start_server(connection=FAST).port, GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_is_read_so_that_the_answer_arrives(start_server: Start) -> None:
    running = start_server(connection=ConnectionLimits(max_body_bytes=1 << 20))
    status, answer, _ = running.call("POST", "/nope", bytes(1 << 20))
    assert (status, list(answer)) == (404, ["error"])
