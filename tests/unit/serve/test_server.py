from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tackboard.core.errors import ConfigError, UsageError
from tackboard.serve.admission import AdmissionConfig
from tackboard.serve.connection import ConnectionLimits
from tackboard.serve.protocol import ProtocolLimits
from tackboard.serve.server import ServeConfig, Server, fit_to_descriptors, take_port

Start = Callable[..., Any]
Body = Callable[..., dict[str, Any]]
PATIENT = AdmissionConfig(timeout_ms=8000)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.005)


def test_the_drain_finishes_what_was_admitted(start_server: Start, request_body: Body) -> None:
    running = start_server(admission=PATIENT)
    running.scorer.gate.clear()
    answers: list[int] = []
    asking = [threading.Thread(target=lambda: answers.append(running.infer(request_body([8]))[0])) for _ in range(3)]
    kept = http.client.HTTPConnection("127.0.0.1", running.port, timeout=5)
    kept.request("GET", "/v2/health/ready")
    assert kept.getresponse().read()
    for thread in asking:
        thread.start()
    # One at work as well: two may wait for a moment while the third has not arrived.
    wait_until(lambda: running.scorer.num_started == 1 and running.server.admission.num_waiting == 2)
    running.server.drain()
    wait_until(lambda: running.server.admission.draining)
    assert running.call("GET", "/v2/health/ready")[:2] == (
        503,
        {"ready": False, "live": True, "error": "the server is draining"},
    )
    assert running.call("GET", "/v2/health/live")[0] == 200
    assert running.call("GET", "/v2/models/scripted/ready")[0] == 503
    kept.request("POST", "/v2/models/scripted/infer", body=json.dumps(request_body([1])))
    refused = kept.getresponse()
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    kept.close()
    assert running.thread.is_alive()
    running.scorer.gate.set()
    running.thread.join(5)
    assert not running.thread.is_alive()
    assert answers == [200, 200, 200]
    assert running.server.num_abandoned == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), timeout=1)


def test_the_drain_has_an_end(start_server: Start, request_body: Body, capsys: pytest.CaptureFixture[str]) -> None:
    running = start_server(admission=PATIENT, drain_timeout_s=0.2)
    running.scorer.gate.clear()
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(running.infer(request_body([8]))[0]))
    asking.start()
    wait_until(lambda: running.scorer.num_started == 1)
    started = time.monotonic()
    running.server.drain()
    asking.join(5)
    assert answers == [503]
    assert time.monotonic() - started < 2
    running.thread.join(5)
    assert running.server.num_abandoned == 1
    assert "1 requests were not finished" in capsys.readouterr().err


def test_an_idle_server_stops_at_once(start_server: Start) -> None:
    running = start_server()
    started = time.monotonic()
    running.server.drain()
    running.thread.join(5)
    assert time.monotonic() - started < 3


def test_a_slow_upload_does_not_hold_the_drain(start_server: Start) -> None:
    running = start_server(drain_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as client:
        client.sendall(b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: running.server.app.num_in_flight == 1)
        started = time.monotonic()
        running.server.drain()
        running.thread.join(5)
        assert not running.thread.is_alive()
        assert time.monotonic() - started < 3


def test_the_model_is_warm_before_the_server_listens(scripted_scorer: Any) -> None:
    scorer = scripted_scorer()
    seen_at_ready: list[int] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        seen_at_ready.append(scorer.num_started)
        ready.set()

    server = Server(scorer, ServeConfig(port=0), on_ready)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(5)
    server.drain()
    thread.join(5)
    assert seen_at_ready == [4]


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}: Address already in use"):
            take_port(ServeConfig(port=port))


def test_an_open_address_needs_a_token_or_a_word() -> None:
    with pytest.raises(UsageError, match="no token is set"):
        take_port(ServeConfig(host="0.0.0.0", port=0))
    for allowed in (
        ServeConfig(host="0.0.0.0", port=0, token="x" * 32),
        ServeConfig(host="0.0.0.0", port=0, insecure=True),
    ):
        take_port(allowed).close()


def test_unknown_hosts_are_told() -> None:
    for host in ("no.such.host.invalid", "999.1.1.1", "a" * 300):
        with pytest.raises(UsageError, match="is neither an address nor a known name"):
            take_port(ServeConfig(host=host, port=0))


def test_connections_leave_descriptors_for_files(capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = ConnectionLimits(num_health_connections=4)
    num_open = os.open(os.devnull, os.O_RDONLY)
    os.close(num_open)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 100, before[1]))
        fitted = fit_to_descriptors(asked)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 600, before[1]))
        assert fit_to_descriptors(asked) == asked
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert 60 <= fitted.max_connections <= 99  # servers of earlier tests may be closing descriptors
    assert fitted.max_connections_per_address == fitted.max_connections // 2
    assert (fitted.num_health_connections, fitted.max_body_bytes) == (4, asked.max_body_bytes)
    assert capsys.readouterr().err == (
        f"at most {fitted.max_connections} connections are served: the limit of open files is {num_open + 100}; "
        "raise it with ulimit -n\n"
    )


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ServeConfig, {"port": 70_000}),
        (ServeConfig, {"max_candidates": 0}),
        (ServeConfig, {"drain_timeout_s": -1}),
        (ServeConfig, {"token": "short"}),
        (AdmissionConfig, {"max_queue": 0}),
        (AdmissionConfig, {"max_timeout_ms": 1}),
        (ProtocolLimits, {"max_tensors": 0}),
        (ConnectionLimits, {"max_connections": 0}),
    ],
)
def test_settings_are_checked(kind: Any, change: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UsageError), match=next(iter(change))):
        kind(**change)


def test_contexts_of_users_are_kept(make_scorer: Callable[..., Any], request_body: Body) -> None:
    """A user asks again with more events; the scores are those of a server that keeps nothing."""
    scorer = make_scorer()
    ready, bodies = threading.Event(), []
    for items in ([3, 4], [3, 4, 5], [3, 4, 5], [9, 4, 5]):
        body = request_body([8, 9, 10], items)
        user = {"name": "user", "datatype": "INT64", "shape": [1], "data": [77]}
        bodies.append({**body, "inputs": [*body["inputs"], user]})
    answers: dict[int, list[Any]] = {}
    for mib in (0, 1):
        server = Server(scorer, ServeConfig(port=0, context_cache_mib=mib), lambda _url: ready.set())
        server.parser_process.start = lambda: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run)
        thread.start()
        assert ready.wait(10)
        ready.clear()
        port = int(server.url.rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

        def call(method: str, path: str, body: Any = None, connection: Any = connection) -> bytes:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            assert response.status == 200
            return bytes(response.read())

        try:
            answers[mib] = [
                json.loads(call("POST", "/v2/models/small/infer", body))["outputs"][0]["data"] for body in bodies
            ]
            (stats,) = json.loads(call("GET", "/v2/models/stats"))["model_stats"]
            metrics = call("GET", "/metrics").decode()
        finally:
            connection.close()
            server.drain()
            thread.join(10)
        assert ("contexts" in stats) == bool(mib)
        extended = f'tackboard_context_requests_total{{outcome="extended"}} {float(mib)}'
        assert extended in metrics
    for kept, computed in zip(answers[1], answers[0], strict=True):
        assert kept == pytest.approx(computed, abs=1e-4)
    figures = stats["contexts"]
    assert {name: count for name, count in figures["requests"].items() if count} == {
        "not_kept": 1,
        "extended": 1,
        "unchanged": 1,
        "moved": 1,
    }
    assert (figures["share_extended"], figures["num_users"]) == (0.5, 1)
    assert f"tackboard_context_cache_bytes {float(figures['bytes'])}" in metrics


def test_a_model_without_contexts_cannot_keep_them(make_scorer: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="no contexts to keep"):
        Server(make_scorer("late-last"), ServeConfig(port=0, context_cache_mib=1))
    with pytest.raises(ConfigError, match="context_cache_mib"):
        ServeConfig(context_cache_mib=-1)
