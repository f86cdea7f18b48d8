"""Hostile traffic on real sockets: each kind ends in a closed connection or a 4xx, and good requests are still served.

Deadlines are short here by configuration; the loops are bounded and everything stays on the loopback interface.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest

from tackboard.bundle.signature import Signature
from tackboard.features.standard import standard_features
from tackboard.scoring.request import RequestReader
from tackboard.serve.connection import ConnectionLimits
from tackboard.serve.server import ServeConfig, Server

DEADLINE_S = 0.5
INFER = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
TENSOR = {"name": "history_item", "datatype": "INT64", "shape": [0], "data": []}
GOOD = {"inputs": [TENSOR, {"name": "candidate_item", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}


class IdScorer:
    """Scores an item by its id."""

    signature = Signature(
        format_version=1,
        name="m",
        version="1",
        id_type="int64",
        actions=("click",),
        surfaces=("home",),
        max_history=4,
        model={},
        tables={},
        lineage={},
    )

    reader = RequestReader(signature, standard_features(signature.vocabulary, 4))

    def compute_features(self, request: Any) -> dict[str, Any]:
        return {}

    def score_features(self, features: Any, candidate_items: np.ndarray) -> np.ndarray:
        return candidate_items.astype(np.float32)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    ready = threading.Event()
    limits = ConnectionLimits(header_deadline_s=DEADLINE_S, body_deadline_s=DEADLINE_S, idle_timeout_s=5.0)
    server = Server(IdScorer(), ServeConfig(port=0, connection=limits), on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(10)
    yield int(server.url.rsplit(":", 1)[1])
    server.drain()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def good_requests_are_served_after_each_attack(port: int) -> Iterator[None]:
    yield
    assert send(port, "POST", "/v2/models/m/infer", json.dumps(GOOD).encode())[0] == 200


def send(port: int, method: str, path: str, body: bytes | None = None, headers: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def attack(port: int, *parts: bytes) -> bytes:
    """Sends the parts and returns what the server says until it closes, which must be soon."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        try:
            for part in parts:
                client.sendall(part)
            while chunk := client.recv(65536):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            return received
    return received


def assert_refused(answer: bytes, *statuses: int) -> None:
    """Closed without a word, or one of these statuses with an error that clients can decode."""
    if not answer:
        return
    assert int(answer.split()[1]) in statuses, answer[:200]
    assert "error" in json.loads(answer.split(b"\r\n\r\n", 1)[1])


def test_fifty_slow_silent_and_stalled_connections(port: int) -> None:
    """A third sends nothing, a third a byte of its headers now and then, a third a byte of its body."""
    latencies: list[float] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(51)]
        for client in clients[34:]:
            client.sendall(INFER + b"Content-Length: 1000\r\n\r\n")
        ends = time.monotonic() + 3 * DEADLINE_S
        while time.monotonic() < ends:
            for client in clients[17:]:
                try:
                    client.sendall(b"G")
                except OSError:
                    continue
            started = time.monotonic()
            assert send(port, "POST", "/v2/models/m/infer", json.dumps(GOOD).encode())[0] == 200
            latencies.append(time.monotonic() - started)
            time.sleep(0.1)
        still_open = 0
        for client in clients:
            client.settimeout(0.05)
            try:
                while client.recv(65536):
                    continue
            except TimeoutError:
                still_open += 1
            except OSError:
                continue
    assert still_open == 0
    assert max(latencies) < 1.0


def test_a_header_of_200_kilobytes(port: int) -> None:
    assert_refused(attack(port, INFER + b"X-Large: " + b"a" * 200_000 + b"\r\n\r\n"), 431)


def test_ten_thousand_headers(port: int) -> None:
    assert_refused(attack(port, INFER + b"".join(b"X-%d: a\r\n" % number for number in range(10_000)) + b"\r\n"), 431)


def test_a_body_said_to_be_a_gigabyte(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(INFER + b"Content-Length: 1073741824\r\n\r\n" + bytes(1000))
        answer = b""
        while not answer.endswith(b"}") and (chunk := client.recv(65536)):  # headers and body may come apart
            answer += chunk
    assert_refused(answer, 413)


def test_a_length_that_is_no_length(port: int) -> None:
    for length in (b"-1", b"9" * 40, b"1e3", b"0x10", b""):
        assert_refused(attack(port, INFER + b"Content-Length: " + length + b"\r\n\r\n"), 400, 408, 413)


def test_a_flood_of_tiny_chunks(port: int) -> None:
    head = INFER + b"Transfer-Encoding: chunked\r\n\r\n"
    assert_refused(attack(port, head, *([b"1\r\na\r\n" * 10_000] * 10)), 400)


def test_bombs_do_not_fill_the_memory(port: int) -> None:
    bombs = [gzip.compress(bytes(200 << 20), 9), gzip.compress(b"[" * (100 << 20), 9)]
    before = psutil.Process().memory_info().rss
    for bomb in bombs:
        status, answer = send(port, "POST", "/v2/models/m/infer", bomb, {"Content-Encoding": "gzip"})
        assert (status, list(json.loads(answer))) == (413, ["error"])
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"inputs":[],"parameters":{"x":' + b"[" * 900 + b"]" * 900 + b"}}",
        b'{"inputs":[' + b"{}," * 2_000_000 + b"{}]}",
    ],
    ids=["open", "lists", "objects", "parsable", "many"],
)
def test_deep_or_endless_json(port: int, body: bytes) -> None:
    status, answer = send(port, "POST", "/v2/models/m/infer", body)
    assert (status, list(json.loads(answer))) == (400, ["error"])


@pytest.mark.parametrize(
    "shape",
    [[2**63 - 1], [2**63], [2**32, 2**32], [-1], [1] * 9, [10**400], ["2"], [2.0], None, {}, [True, 2]],
    ids=lambda shape: str(shape)[:20],
)
def test_shapes_that_cannot_be(port: int, shape: Any) -> None:
    tensor = {"name": "candidate_item", "datatype": "INT64", "shape": shape, "data": [1, 2]}
    for parameters in ({}, {"binary_data_size": 16}):
        envelope = json.dumps({"inputs": [{**tensor, "parameters": parameters}]}).encode()
        length = {"Inference-Header-Content-Length": str(len(envelope))} if parameters else {}
        status, answer = send(port, "POST", "/v2/models/m/infer", envelope + bytes(16 if parameters else 0), length)
        assert (status, list(json.loads(answer))) == (400, ["error"])


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[{"name":"candidate_item","datatype":"INT64","shape":[NaN],"data":[1]}]}',
        b'{"inputs":[{"name":"candidate_item","datatype":"INT64","shape":[1],"data":[Infinity]}]}',
        b'{"inputs":[],"inputs":7}',
        json.dumps({"inputs": [TENSOR, TENSOR]}).encode(),
        b"\x00" * 1000,
        b"",
    ],
)
def test_bodies_that_mean_nothing(port: int, body: bytes) -> None:
    status, answer = send(port, "POST", "/v2/models/m/infer", body)
    assert (status, list(json.loads(answer))) == (400, ["error"])


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fetc%2fpasswd", "%2e%2e", "..", "a%00b", "%ff", "%5c..%5c", "m%2f..%2fm", "%0d%0aX-Injected:%201"],
)
def test_names_that_would_be_paths(port: int, name: str) -> None:
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/m/versions/{name}"):
        status, answer = send(port, "GET", path)
        assert status in (400, 404)
        assert list(json.loads(answer)) == ["error"]
        assert b"passwd" not in answer


def test_random_bytes(port: int) -> None:
    generator = np.random.default_rng(7)
    for _ in range(50):
        attack(port, generator.bytes(200) + b"\r\n\r\n")
        body = generator.bytes(300)
        headers = {"Inference-Header-Content-Length": str(int(generator.integers(0, 400)))}
        assert send(port, "POST", "/v2/models/m/infer", body, headers)[0] == 400
