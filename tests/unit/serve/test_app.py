"""The application through real sockets, with plain HTTP and with the public client, unmodified."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tackboard.features.language import Events, FeatureSet, sequence
from tackboard.features.serving_log import FeatureLog, open_log
from tackboard.serve.admission import AdmissionConfig
from tackboard.serve.app import ErrorLog
from tackboard.serve.parser_process import ParserProcess
from tackboard.serve.protocol import ProtocolLimits

Start = Callable[..., Any]
Body = Callable[..., dict[str, Any]]
LARGE = list(range(10**15, 10**15 + 10_000))
"""Candidates whose JSON goes to the parser's process."""
TOKEN = "a-token-of-32-characters-0123456"


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.005)


def triton_inputs(candidates: Any, *, binary: bool, history: int = 2) -> list[Any]:
    items = np.arange(history, dtype=np.int64)
    columns = {
        "history_item": (items, "INT64"),
        "history_action": (np.array(["click"] * history, dtype=np.object_), "BYTES"),
        "history_surface": (np.array(["home"] * history, dtype=np.object_), "BYTES"),
        "history_time_ms": (items * 1000, "INT64"),
        "candidate_item": (np.array(candidates, dtype=np.int64), "INT64"),
    }
    inputs = []
    for name, (values, datatype) in columns.items():
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, binary_data=binary)
        inputs.append(tensor)
    return inputs


def test_tritonclient_works_unmodified(start_server: Start) -> None:
    running = start_server()
    client = triton.InferenceServerClient(f"127.0.0.1:{running.port}")
    candidates = list(range(100))
    for binary_in, binary_out, compression in itertools.product(
        (False, True), (False, True, None), (None, "gzip", "deflate")
    ):
        outputs = None if binary_out is None else [triton.InferRequestedOutput("score", binary_data=binary_out)]
        result = client.infer(
            "scripted",
            triton_inputs(candidates, binary=binary_in),
            outputs=outputs,
            request_id="r1",
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        assert np.array_equal(result.as_numpy("score"), np.array(candidates, dtype=np.float32) / 8)
        assert result.get_response()["id"] == "r1"
    client.close()
    assert running.scorer.num_started == 18


def test_tritonclient_reads_everything_it_asks_for(start_server: Start) -> None:
    running = start_server()
    client = triton.InferenceServerClient(f"127.0.0.1:{running.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("scripted")
    assert client.is_model_ready("scripted", "1")
    assert not client.is_model_ready("scripted", "2")
    assert not client.is_model_ready("other")
    assert "statistics" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("scripted")["versions"] == ["1"]
    assert client.get_model_config("scripted")["platform"] == "tackboard"
    client.infer("scripted", triton_inputs([1, 2], binary=True), model_version="1")
    for statistics in (client.get_inference_statistics(), client.get_inference_statistics("scripted", "1")):
        assert statistics["model_stats"][0]["inference_stats"]["success"]["count"] == 1
    with pytest.raises(InferenceServerException, match="no model of this name"):
        client.infer("other", triton_inputs([1], binary=True))
    with pytest.raises(InferenceServerException, match="no model of this name"):
        client.get_model_metadata("caf\u00e9 %2f")
    client.close()


def test_health_has_both_keys(start_server: Start) -> None:
    running = start_server()
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert running.call("GET", path)[:2] == (200, {"live": True, "ready": True})
    assert running.call("GET", "/v2/models/scripted/ready")[1] == {"name": "scripted", "ready": True}
    assert running.call("HEAD", "/v2")[0] == 200


def test_a_json_answer(start_server: Start, request_body: Body) -> None:
    running = start_server()
    status, answer, headers = running.infer({**request_body([8, 16]), "id": "x"})
    assert status == 200
    assert answer == {
        "model_name": "scripted",
        "model_version": "1",
        "id": "x",
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}],
    }
    assert "inference-header-content-length" not in headers


def test_errors_have_one_shape(start_server: Start) -> None:
    running = start_server()
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/scripted/versions/9", 404),
        ("POST", "/v2/models/scripted/versions/9/infer", 404),
        ("GET", "/v2/models/scripted/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/models/..%2f..%2fetc", 400),
        ("POST", "/v2/repository/index", 404),
    ):
        found, answer, _ = running.call(method, path, b"" if method == "POST" else None)
        assert found == status
        assert list(answer) == ["error"]
        assert isinstance(answer["error"], str)


def test_errors_of_the_body(start_server: Start, request_body: Body) -> None:
    limits, patience = ProtocolLimits(max_body_bytes=100_000), AdmissionConfig(timeout_ms=8000)
    running = start_server(protocol=limits, admission=patience, max_candidates=4)
    assert running.infer(b"{")[0] == 400
    assert running.infer(request_body([1, 2, 3, 4, 5]))[0] == 400
    assert running.infer(bytes(100_001))[0] == 413
    assert running.call("POST", "/v2/models/scripted/infer", (bytes(10_000) for _ in range(11)))[0] == 413, "chunked"
    assert running.infer(b"x", {"Content-Encoding": "br"})[0] == 415
    assert running.infer(gzip.compress(bytes(10_000_000)), {"Content-Encoding": "gzip"})[0] == 413
    assert running.infer({**request_body([1]), "outputs": [{"name": "nope"}]})[0] == 400
    assert running.infer(request_body([1], sequence_id=4))[0] == 501
    assert running.infer(request_body([1, 2]))[0] == 200
    assert running.scorer.num_started == 1


def test_a_body_in_many_chunks(start_server: Start, request_body: Body) -> None:
    running = start_server(admission=AdmissionConfig(timeout_ms=8000))
    body = json.dumps(request_body(LARGE)).encode()
    chunks = (body[start : start + 97] for start in range(0, len(body), 97))
    status, answer, _ = running.call("POST", "/v2/models/scripted/infer", chunks)
    assert (status, len(answer["outputs"][0]["data"])) == (200, 10_000)


def test_a_model_that_fails_is_a_500_without_its_words(
    start_server: Start, request_body: Body, scripted_scorer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = start_server()
    running.scorer.fail_with = ValueError("user 4711")
    with caplog.at_level(logging.WARNING, "tackboard.serve"):
        status, answer, _ = running.infer(request_body([1]))
    assert status == 500
    assert "4711" not in json.dumps(answer) + caplog.text
    assert "model error: ValueError at conftest.py:" in caplog.text


@pytest.fixture
def stuck_parser(start_server: Start) -> Iterator[Callable[..., Any]]:
    """Starts a server whose parser's process stands still until SIGCONT; `begun` counts the bodies that it got."""
    pids: list[int] = []

    def start(**config: Any) -> Any:
        running = start_server(**config)
        running.begun = []
        parse = running.server.parsing._score
        running.server.parsing._score = lambda body: (running.begun.append(1), parse(body))[1]
        ParserProcess.start(running.server.parser_process)
        pids.append(running.server.parser_process.pid)
        os.kill(pids[-1], signal.SIGSTOP)
        return running

    yield start
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_parsing_counts_against_the_deadline(stuck_parser: Start, request_body: Body) -> None:
    running = stuck_parser()
    threads = [threading.Thread(target=running.infer, args=(request_body(LARGE, timeout=1_500_000),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Until the first is with the parser, the third, due earlier, could still pass it.
    wait_until(lambda: len(running.begun) == 1 and running.server.parsing.num_waiting == 1)
    status, answer, _ = running.infer(request_body(LARGE, timeout=100_000))
    assert (status, answer["error"]) == (504, "the deadline passed while the request was waiting in the queue")
    assert running.infer(request_body([8]))[0] == 200, "small requests need no parser"
    for thread in threads:
        thread.join(5)
    text = running.call("GET", "/metrics")[1]
    assert b'tackboard_deadline_expired_total{stage="parse"} 3.0' in text
    os.kill(running.server.parser_process.pid, signal.SIGCONT)
    wait_until(lambda: running.server.parsing.is_idle)
    assert running.infer(request_body(LARGE))[0] == 200
    # One of the three had been begun; the other two were left alone.
    assert len(running.begun) == 2


def test_a_client_that_leaves_takes_its_body_along(stuck_parser: Start, request_body: Body) -> None:
    running = stuck_parser(admission=AdmissionConfig(timeout_ms=8000))
    first = threading.Thread(target=running.infer, args=(request_body(LARGE),))
    first.start()
    wait_until(lambda: not running.server.parsing.is_idle and running.server.parsing.num_waiting == 0)
    body = json.dumps(request_body(LARGE)).encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as client:
        client.sendall(b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: x\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: running.server.parsing.num_waiting == 1)
    wait_until(lambda: running.server.parsing.num_waiting == 0)
    os.kill(running.server.parser_process.pid, signal.SIGCONT)
    first.join(5)
    wait_until(lambda: running.server.parsing.is_idle)
    assert len(running.begun) == 1
    assert running.server.app._buffered_bytes == 0


def test_bodies_that_wait_are_bounded(stuck_parser: Start, request_body: Body) -> None:
    running = stuck_parser(max_parses=1, admission=AdmissionConfig(timeout_ms=8000))
    large = request_body(LARGE)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(running.infer(large)[0])) for _ in range(2)]
    threads[0].start()
    wait_until(lambda: not running.server.parsing.is_idle and running.server.parsing.num_waiting == 0)
    threads[1].start()
    wait_until(lambda: running.server.parsing.num_waiting == 1)
    status, _, headers = running.infer(large)
    assert (status, headers["retry-after"]) == (429, "1")
    os.kill(running.server.parser_process.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(5)
    assert answers == [200, 200]


def test_the_drain_does_not_wait_for_a_stuck_parser(stuck_parser: Start, request_body: Body) -> None:
    running = stuck_parser(drain_timeout_s=0.2, admission=AdmissionConfig(timeout_ms=8000))
    pid = running.server.parser_process.pid
    answers: list[int] = []
    large = request_body(LARGE)
    thread = threading.Thread(target=lambda: answers.append(running.infer(large)[0]))
    thread.start()
    wait_until(lambda: not running.server.parsing.is_idle)
    running.server.drain()
    thread.join(5)
    running.thread.join(5)
    assert not running.thread.is_alive()
    assert answers == [503]
    assert not psutil.pid_exists(pid)


def test_the_token_guards_every_path(start_server: Start, request_body: Body) -> None:
    running = start_server(token=TOKEN)
    paths = ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/scripted", "/metrics", "/nope"]
    for path in paths:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer \xe9"},
        ):
            status, answer, found = running.call("GET", path, headers=headers)
            assert (status, found["www-authenticate"]) == (401, "Bearer")
            assert "error" in answer
    assert running.infer(request_body([1]))[0] == 401
    good = {"Authorization": f"Bearer {TOKEN}"}
    assert [running.call("GET", path, headers=good)[0] for path in paths] == [200] * 5 + [404]
    assert running.infer(request_body([1]), good)[0] == 200


def test_large_bodies_share_one_buffer(start_server: Start, request_body: Body) -> None:
    running = start_server()
    running.server.app._max_buffered_bytes = 1000
    assert running.infer(bytes(5000))[0] == 429
    assert running.infer(request_body([1]))[0] == 200, "the buffer must be given back"
    assert running.server.app._buffered_bytes == 0


def test_the_error_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = [10.0]
    log = ErrorLog(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "tackboard.serve"):
        for _ in range(100):
            log.write("429 infer")
        now[0] = 11.0
        log.write("500 infer")
    assert [record.getMessage() for record in caplog.records] == ["429 infer"] * 20 + [
        "80 more errors were not logged in one second",
        "500 infer",
    ]


def test_errors_are_logged_in_one_line_without_ids(
    start_server: Start, request_body: Body, caplog: pytest.LogCaptureFixture
) -> None:
    running = start_server()
    body = request_body([1])
    body["inputs"][0]["data"] = ["secret-4711", "secret-4712"]
    with caplog.at_level(logging.WARNING, "tackboard.serve"):
        status, answer, _ = running.infer(body)
    assert status == 400
    assert "secret" not in json.dumps(answer) + caplog.text
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("400 infer ")


def test_inputs_that_the_model_does_not_read_are_trimmed_and_counted(
    start_server: Start, scripted_scorer: Any, request_body: Body
) -> None:
    events = Events()
    features = FeatureSet("little", history=sequence(item=events.newest(8).collect(events.item)))
    running = start_server(scripted_scorer(features=features))
    status, _, _ = running.infer(request_body([1, 2]))
    assert status == 200
    (seen,) = running.scorer.seen
    assert set(seen.history) == {"item", "time"}
    sent = len(b'["click","click"]') + len(b'["home","home"]')
    _, stats, _ = running.call("GET", "/v2/models/stats")
    assert stats["model_stats"][0]["trimmed_bytes"] == sent
    _, metrics, _ = running.call("GET", "/metrics")
    assert f"tackboard_trimmed_bytes_total {float(sent)}" in metrics.decode()
    _, metadata, _ = running.call("GET", "/v2/models/scripted")
    assert "history_surface" not in [entry["name"] for entry in metadata["inputs"]]
    client = triton.InferenceServerClient(f"127.0.0.1:{running.port}")
    client.infer("scripted", triton_inputs([1, 2], binary=True))
    client.close()
    _, stats, _ = running.call("GET", "/v2/models/stats")
    assert stats["model_stats"][0]["trimmed_bytes"] == sent + 2 * (4 + 5) + 2 * (4 + 4)


def test_values_that_training_never_saw_are_counted(start_server: Start, request_body: Body) -> None:
    running = start_server()
    body = request_body([1, 2])
    assert running.infer(body)[0] == 200
    body["inputs"] = [entry for entry in body["inputs"] if entry["name"] != "history_surface"]
    assert running.infer(body)[0] == 200
    _, metrics, _ = running.call("GET", "/metrics")
    assert 'tackboard_unknown_values_total{field="surface"} 2.0' in metrics.decode()
    assert 'tackboard_unknown_values_total{field="action"} 0.0' in metrics.decode()


def test_served_features_are_logged_and_counted(
    start_server: Start, scripted_scorer: Any, request_body: Body, tmp_path: Path
) -> None:
    scorer, key = scripted_scorer(), bytes(range(32))
    log = FeatureLog(tmp_path, scorer.features, key)
    running = start_server(scorer, feature_log=log)
    body = request_body([1, 2])
    assert running.infer(body)[0] == 200
    for name, value in (("user", 123_456_789), ("request_time_ms", 5000)):
        body["inputs"].append({"name": name, "datatype": "INT64", "shape": [1], "data": [value]})
    assert running.infer(body)[0] == 200
    wait_until(lambda: log.num_logged == 1)
    _, metrics, _ = running.call("GET", "/metrics")
    for outcome in ("logged", "without_user_or_time"):
        assert f'tackboard_feature_log_total{{outcome="{outcome}"}} 1.0' in metrics.decode()
    running.server.drain()
    running.thread.join(10)
    (file,) = open_log(tmp_path, key)
    assert [record.request_ms for record in file.records()] == [5000]
    assert b"123456789" not in file.path.read_bytes()
