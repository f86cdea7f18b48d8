"""A scripted scorer and a real server around it: what is tested here is the queue and the wire, not a model."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from tackboard.bundle.signature import Signature
from tackboard.serve.server import ServeConfig, Server


@dataclass
class ScriptedScorer:
    """Scores an item by its id, and waits for `gate` first; `started` counts computations that began."""

    id_type: Literal["int64", "string"] = "int64"
    name: str = "scripted"
    fail_with: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    num_started: int = 0
    seen: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self.signature = Signature(
            format_version=1,
            name=self.name,
            version="1",
            id_type=self.id_type,
            actions=("click", "save"),
            surfaces=("home", "search"),
            max_history=8,
            model={},
            tables={},
            lineage={},
        )

    def score(self, request: Any) -> np.ndarray:
        self.num_started += 1
        self.seen.append(request)
        self.gate.wait(10)
        if self.fail_with is not None:
            raise self.fail_with
        return (request.candidate_items % 1000 / 8).astype(np.float32)


@dataclass
class Running:
    """A started server and a way to talk to it."""

    server: Server
    scorer: ScriptedScorer
    thread: threading.Thread
    port: int

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, parsed JSON or raw bytes, lower-case headers) of one call."""
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.headers.items()}
        parsed = json.loads(raw) if raw and found.get("content-type") == "application/json" else raw
        return response.status, parsed, found

    def infer(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        return self.call("POST", f"/v2/models/{self.scorer.name}/infer", body, headers)


def make_request_body(
    candidates: list[Any], history_items: list[Any] | None = None, **parameters: Any
) -> dict[str, Any]:
    items = [5, 6] if history_items is None else history_items
    count = len(items)
    id_datatype = "BYTES" if candidates and isinstance(candidates[0], str) else "INT64"
    columns: list[tuple[str, str, list[Any]]] = [
        ("history_item", id_datatype, items),
        ("history_action", "BYTES", ["click"] * count),
        ("history_surface", "BYTES", ["home"] * count),
        ("history_time_ms", "INT64", [1000 * position for position in range(count)]),
        ("candidate_item", id_datatype, candidates),
    ]
    body: dict[str, Any] = {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}
            for name, datatype, values in columns
        ]
    }
    if parameters:
        body["parameters"] = parameters
    return body


@pytest.fixture
def request_body() -> Callable[..., dict[str, Any]]:
    return make_request_body


@pytest.fixture
def scripted_scorer() -> type[ScriptedScorer]:
    return ScriptedScorer


@pytest.fixture(scope="session")
def stopping() -> Iterator[list[threading.Thread]]:
    """Servers that were told to stop; stopping takes 0.2 s, and the next test need not wait for it."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(10)
    assert not [thread for thread in threads if thread.is_alive()]


@pytest.fixture
def start_server(stopping: list[threading.Thread]) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(scorer: ScriptedScorer | None = None, **config: Any) -> Running:
        scorer = scorer or ScriptedScorer()
        ready = threading.Event()
        server = Server(scorer, ServeConfig(port=0, **config), on_ready=lambda _url: ready.set())
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert ready.wait(10), "the server did not become ready"
        scorer.num_started = 0
        scorer.seen.clear()
        started.append(Running(server, scorer, thread, int(server.url.rsplit(":", 1)[1])))
        return started[-1]

    yield start
    for running in started:
        running.scorer.gate.set()
        running.server.drain()
        stopping.append(running.thread)
