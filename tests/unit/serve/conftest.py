"""A scripted scorer and a real server around it: what is tested here is the queue and the wire, not a model."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from tackboard.bundle.signature import Signature
from tackboard.features.column import Column
from tackboard.features.feature_set import FeatureSet
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import standard_features
from tackboard.scoring.request import RequestReader, ScoreRequest
from tackboard.serve.server import ServeConfig, Server


@dataclass
class ScriptedScorer:
    """Computes features in earnest and scores an item by its id, after a wait for `gate`.

    `features` is what it reads, the standard history if nothing is given; `num_started` counts computations.
    """

    id_type: Literal["int64", "string"] = "int64"
    name: str = "scripted"
    features: FeatureSet | None = None
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
        self.features = self.features or standard_features(self.signature.vocabulary, 8)
        self.reader = RequestReader(self.signature, self.features)
        self._executor = OnlineExecutor(self.features.plan)

    def compute_features(self, request: ScoreRequest) -> dict[str, Column]:
        self.seen.append(request)
        return self._executor.compute(
            history=request.history,
            request_ms=request.request_ms,
            user_id=request.user_id or 0,
            item_ids=request.candidate_items,
            **request.attributes,
        )

    def score_features(self, features: Mapping[str, Column], candidate_items: np.ndarray) -> np.ndarray:
        self.num_started += 1
        self.gate.wait(10)
        if self.fail_with is not None:
            raise self.fail_with
        return (candidate_items % 1000 / 8).astype(np.float32)


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

    def start(scorer: ScriptedScorer | None = None, feature_log: Any = None, **config: Any) -> Running:
        scorer = scorer or ScriptedScorer()
        ready = threading.Event()
        settings = ServeConfig(port=0, **config)
        server = Server(scorer, settings, on_ready=lambda _url: ready.set(), feature_log=feature_log)
        # The first large body starts the parser's process; most tests send none, and a process costs a second.
        server.parser_process.start = lambda: None  # type: ignore[method-assign]
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
