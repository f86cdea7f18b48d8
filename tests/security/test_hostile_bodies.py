"""Bodies made to be expensive: none holds up the event loop, and none takes much memory.

The server is real and runs in a process of its own; see `probed_server`. A bound on CPU time holds on a busy machine.
"""

from __future__ import annotations

import functools
import gzip
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tackboard.serve.tensors import to_binary

MAX_CALLBACK_MS = 5.0
PATH = "/v2/models/m/infer"
GZIP = {"Content-Encoding": "gzip"}
Request = tuple[bytes, dict[str, str]]


class Probed:
    """A probed server and a way to talk to it."""

    def __init__(self, id_type: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("probed_server.py")), id_type]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        self.longest_callback()

    def longest_callback(self) -> dict[str, Any]:
        # The callback that wrote an answer may not have ended yet; the one of the next call comes after it.
        health_ms(self.port, 0)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def send(self, request: Request) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", PATH, body=request[0], headers=request[1])
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def memory_bytes(self) -> int:
        """Resident memory of the server and of what it started."""
        server = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (server, *server.children(recursive=True)))

    def stop(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Probed]]:
    found = {"int64": Probed("int64"), "string": Probed("string")}
    yield found
    for server in found.values():
        server.stop()


def tensor(name: str, values: Any, datatype: str, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], "data": values}


def as_json(*entries: dict[str, Any]) -> Request:
    return json.dumps({"inputs": entries}, separators=(",", ":")).encode(), {}


def as_binary(*tensors: tuple[str, str, list[int], bytes]) -> Request:
    entries = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
        for name, datatype, shape, raw in tensors
    ]
    head = json.dumps({"inputs": entries}).encode()
    return head + b"".join(raw for *_, raw in tensors), {"Inference-Header-Content-Length": str(len(head))}


def zipped(request: Request) -> Request:
    return gzip.compress(request[0]), {**request[1], **GZIP}


def empty_texts_below_the_ratio(num_texts: int, num_said: int) -> Request:
    """Very many empty BYTES elements, with noise behind them that keeps the compression ratio just under 100."""
    noise = np.random.default_rng(1).bytes(num_texts * 4 // 105)
    plain = texts(("candidate_item", num_said, bytes(4 * num_texts) + noise))
    found = zipped(plain)
    assert 90 < len(plain[0]) / len(found[0]) < 100
    return found


NAMES = [f"item-{number}" for number in range(10_000)]


def million_events() -> Request:
    """The largest history that fits into a body."""
    values = np.random.default_rng(2).integers(0, 1 << 60, 4_000_000).tobytes()
    return as_binary(
        ("history_item", "INT64", [4_000_000], values),
        ("history_time_ms", "INT64", [4_000_000], values),
        ("candidate_item", "INT64", [1], bytes(8)),
    )


def binary_history(count: int) -> Request:
    values = np.random.default_rng(2).integers(0, 1 << 60, count).tobytes()
    return as_binary(
        ("history_item", "INT64", [count], values),
        ("history_time_ms", "INT64", [count], values),
        ("candidate_item", "INT64", [10_000], np.arange(10_000).tobytes()),
    )


def long_history() -> Request:
    count = 50_000
    return as_json(
        tensor("history_item", list(range(count)), "INT64"),
        tensor("history_action", ["click", "save"] * (count // 2), "BYTES"),
        tensor("history_time_ms", list(range(count, 0, -1)), "INT64"),
        tensor("candidate_item", [1, 2], "INT64"),
    )


def candidates_with_attributes() -> Request:
    return as_binary(
        ("history_item", "BYTES", [0], b""),
        ("candidate_item", "BYTES", [10_000], to_binary("BYTES", NAMES)),
        ("candidate_title", "BYTES", [10_000], to_binary("BYTES", NAMES)),
        ("candidate_words", "BYTES", [10_000], to_binary("BYTES", ['["a","b","c"]'] * 10_000)),
    )


def texts(*given: tuple[str, int, bytes]) -> Request:
    """A binary request for the model of string ids: history, candidates and BYTES tensors of (name, rows, raw)."""
    always = [("history_item", 0, b""), ("candidate_item", 1, to_binary("BYTES", ["a"]))]
    found = {name: (name, "BYTES", [rows], raw) for name, rows, raw in (*always, *given)}
    return as_binary(*found.values())


def numbers(candidates: Any, *more: dict[str, Any]) -> Request:
    return as_json(tensor("history_item", [], "INT64", [0]), tensor("candidate_item", candidates, "INT64"), *more)


# Name: the model, a maker of the request, and the status that it must get. The last ones are the worst among those
# that are read on the event loop itself.
REQUESTS: dict[str, tuple[str, Callable[[], Request], int]] = {
    "empty texts, ratio 99": ("string", lambda: empty_texts_below_the_ratio(16_000_000, 2), 413),
    "as many said to be there": ("string", lambda: empty_texts_below_the_ratio(16_000_000, 7_000_000), 413),
    "as many as decompress": ("string", lambda: empty_texts_below_the_ratio(3_900_000, 10_000), 400),
    "not even compressed": ("string", lambda: texts(("candidate_title", 1, bytes(30 << 20))), 400),
    "of no known name": ("string", lambda: texts(("x", 250_000, bytes(1_000_000))), 400),
    "of no right type": ("string", lambda: texts(("history_time_ms", 9_000, bytes(36_000))), 400),
    "empty lists": ("int64", lambda: numbers([[]] * 499_000), 400),
    "few empty lists": ("int64", lambda: numbers([[]] * 10_000), 400),
    "objects": ("int64", lambda: (b'{"inputs":[' + b"{}," * 499_000 + b"{}]}", {}), 400),
    "4M events": ("int64", million_events, 400),
    "events as JSON": ("int64", lambda: numbers([1], tensor("history_time_ms", [1] * 999_000, "INT64")), 400),
    "small bomb": ("int64", lambda: (gzip.compress(b" " * 6_000_000 + b"{}"), GZIP), 413),
    "larger bomb": ("int64", lambda: (gzip.compress(b"[" * (60 << 20), 9), GZIP), 413),
    "deep": ("int64", lambda: (b"[" * 900_000 + b"]" * 900_000, {}), 400),
    "deep and small": ("int64", lambda: (b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}", {}), 400),
    "one text": ("int64", lambda: (b'{"inputs":[],"id":"' + b"\\u0041" * 10_000_000 + b'"}', {}), 400),
    "numbers in one text": ("int64", lambda: numbers([1], one_list("1," * 14_000)), 200),
    "string ids, JSON": ("string", lambda: as_json(*TEXTS, tensor("candidate_item", NAMES, "BYTES")), 200),
    "string ids, binary": ("string", candidates_with_attributes, 200),
    "string ids, gzip": ("string", lambda: zipped(candidates_with_attributes()), 200),
    "long history": ("int64", long_history, 200),
    "10,000 candidates, JSON": ("int64", lambda: numbers(list(range(10**15, 10**15 + 10_000))), 200),
    "10,000 candidates, binary": ("int64", lambda: binary_history(0), 200),
    "worst: numbers": ("int64", lambda: numbers([1] * 4_900, tensor("candidate_price", [1] * 4_900, "FP64")), 200),
    "worst: brackets": (
        "int64",
        lambda: (b'{"inputs":[' + b"[]," * 2_650 + b'[]],"x":' + b"[" * 90 + b"]" * 90 + b"}", {}),
        400,
    ),
    "worst: texts": ("string", lambda: as_json(*TEXTS, tensor("candidate_item", NAMES[:1_400], "BYTES")), 200),
    "worst: lists": ("int64", lambda: numbers([1], one_list("1," * 850)), 200),
    "worst: events": ("int64", lambda: binary_history(2_200), 200),
}
TEXTS = (tensor("history_item", [], "BYTES", [0]),)


def one_list(inside: str) -> dict[str, Any]:
    return tensor("candidate_numbers", [f"[{inside}1]"], "BYTES")


@functools.cache
def request_of(name: str) -> Request:
    return REQUESTS[name][1]()


@pytest.mark.parametrize("name", REQUESTS)
def test_no_callback_of_the_event_loop_takes_long(servers: dict[str, Probed], name: str) -> None:
    model, _, status = REQUESTS[name]
    request = request_of(name)
    # On a shared core the same work takes up to twice the CPU time, now and then; code that is slow is so every time.
    for _ in range(3):
        servers[model].longest_callback()
        found, answer = servers[model].send(request)
        longest, most = servers[model].longest_callback(), MAX_CALLBACK_MS * slowness()
        if longest["ms"] < most:
            break
    assert longest["ms"] < most, longest
    assert found == status, answer[:300]
    assert found == 200 or list(json.loads(answer)) == ["error"]


def test_a_large_body_whose_client_leaves(servers: dict[str, Probed]) -> None:
    server = servers["int64"]
    server.longest_callback()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 64000000\r\n\r\n" % PATH.encode())
        client.sendall(bytes(63_000_000))
    time.sleep(0.2)
    longest = server.longest_callback()
    assert longest["ms"] < MAX_CALLBACK_MS, longest


def slowness() -> float:
    """How much slower this machine is now than where the bound was set, by a loop that took 0.06 s there."""
    started = time.process_time()
    sum(number + 1 for number in range(1_000_000))
    return max(1.0, (time.process_time() - started) / 0.06)


def health_ms(port: int, seconds: float) -> list[float]:
    """Times of health calls on one connection, one after another."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = []
    ends = time.monotonic() + seconds
    while not times or time.monotonic() < ends:
        started = time.perf_counter()
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        response.read()
        times.append((time.perf_counter() - started) * 1000)
        assert response.status == 200
        time.sleep(0.002)
    connection.close()
    return times


def test_health_answers_while_such_bodies_come_in(servers: dict[str, Probed]) -> None:
    server = servers["string"]
    attacks = [request_of(name) for name in ("as many as decompress", "string ids, binary", "objects")]
    idle_ms = float(np.percentile(health_ms(server.port, 0.5), 99))
    stop = threading.Event()
    num_sent = [0]

    def attack(request: Request) -> None:
        while not stop.is_set():
            server.send(request)
            num_sent[0] += 1

    threads = [threading.Thread(target=attack, args=(request,)) for request in attacks]
    for thread in threads:
        thread.start()
    busy_ms = float(np.percentile(health_ms(server.port, 2.0), 99))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert num_sent[0] >= 3
    # Two cores are shared by the client, the server and its parser: the bound is generous. It was seconds.
    assert busy_ms < 20 * idle_ms + 100, (idle_ms, busy_ms)


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["busy", "idle"])
def test_a_killed_server_leaves_no_parser_behind(busy: bool) -> None:
    server = Probed("int64")
    (parser,) = psutil.Process(server.process.pid).children()
    if busy:
        body = request_of("one text")[0]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)))
            client.sendall(body)
            server.process.kill()
    else:
        server.process.kill()
    server.process.wait(10)
    parser.wait(10)
    for pipe in (server.process.stdin, server.process.stdout):
        assert pipe
        pipe.close()


def test_ten_at_once_take_little_memory(servers: dict[str, Probed]) -> None:
    server = servers["string"]
    request = request_of("empty texts, ratio 99")
    before = server.memory_bytes()
    threads = [threading.Thread(target=server.send, args=(request,)) for _ in range(10)]
    peak = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, server.memory_bytes())
        time.sleep(0.005)
    assert peak - before < 200 << 20


def test_a_refused_body_is_let_go_at_once(servers: dict[str, Probed]) -> None:
    server = servers["string"]
    request = request_of("not even compressed")
    server.send(request)
    before = server.memory_bytes()
    for _ in range(4):
        assert server.send(request)[0] == 400
    assert server.memory_bytes() - before < len(request[0])
