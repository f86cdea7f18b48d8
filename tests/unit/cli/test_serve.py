"""The serve command in this process, with a scripted scorer in the place of a bundle."""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tackboard.bundle.signature import Signature
from tackboard.cli.serve import serve
from tackboard.core.errors import ConfigError, UsageError
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.serving_log import open_log, user_digest
from tackboard.features.standard import standard_features
from tackboard.scoring.client import ScoringClient
from tackboard.scoring.request import RequestReader
from tackboard.scoring.scorer import Scorer


class FirstScorer:
    """Gives every candidate the score 1."""

    signature = Signature(
        format_version=1,
        name="ones",
        version="1",
        id_type="int64",
        actions=("click",),
        surfaces=("home",),
        max_history=4,
        model={},
        tables={},
        lineage={},
    )

    features = standard_features(signature.vocabulary, 4)
    reader = RequestReader(signature, features)

    def compute_features(self, request: Any) -> dict[str, Any]:
        return OnlineExecutor(self.features.plan).compute(history=request.history)

    def score_features(self, features: Any, candidate_items: np.ndarray) -> np.ndarray:
        return np.ones(len(candidate_items), dtype=np.float32)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(serve)
    return app


def run(app: typer.Typer, *arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def serve_and_use(app: typer.Typer, folder: Path, use: Callable[[int], None], *arguments: str) -> Any:
    """The result of `tackboard serve`, on which `use` was called with the port and which then got SIGTERM."""
    port_file = folder / "port"

    def use_and_stop() -> None:
        ends = time.monotonic() + 10
        while not port_file.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        try:
            use(int(port_file.read_text()))
        finally:
            if port_file.exists():
                os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=use_and_stop)
    user.start()
    result = run(app, str(folder), "--port", "0", "--port-file", str(port_file), *arguments)
    user.join(10)
    assert not port_file.exists()
    return result


def test_it_serves_until_it_is_told_to_stop(app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def load(bundle: Path, code_file: Path | None = None, num_threads: int | None = None) -> FirstScorer:
        loaded.append((bundle, code_file, num_threads))
        return FirstScorer()

    monkeypatch.setattr(Scorer, "load", load)
    monkeypatch.setenv("TACKBOARD_TOKEN", "a-token-of-32-characters-0123456")
    answers: list[Any] = []

    def use(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        for headers in ({}, {"Authorization": "Bearer a-token-of-32-characters-0123456"}):
            connection.request("GET", "/v2/models/ones", headers=headers)
            response = connection.getresponse()
            answers.append((response.status, json.loads(response.read())))
        connection.close()

    result = serve_and_use(app, tmp_path, use, "--threads", "2")
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("serving ones on http://127.0.0.1:")
    assert len(result.stdout.splitlines()) == 1
    assert loaded == [(tmp_path, None, 2)]
    assert [status for status, _ in answers] == [401, 200]
    assert answers[1][1]["name"] == "ones"
    assert gc.get_freeze_count() > 0, "the loop must not look for garbage in all that was loaded"
    gc.unfreeze()


@pytest.mark.parametrize("option", ["--max-connections", "--max-connections-per-address"])
def test_connections_are_limited_as_told(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(Scorer, "load", lambda *_arguments, **_settings: FirstScorer())
    monkeypatch.delenv("TACKBOARD_TOKEN", raising=False)
    ended: list[bytes] = []

    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as first:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                ended.append(first.recv(65536))

    assert serve_and_use(app, tmp_path, use, option, "1").exit_code == 0
    assert ended[0].startswith(b"HTTP/1.1 429 ")


def test_features_are_logged_where_it_is_told_to(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "load", lambda *_arguments, **_settings: FirstScorer())
    monkeypatch.delenv("TACKBOARD_TOKEN", raising=False)
    key = bytes(range(32))
    (tmp_path / "log.key").write_text(key.hex())

    def use(port: int) -> None:
        for user in (5, 6):
            client = ScoringClient(f"http://127.0.0.1:{port}")
            client.score({"item": [1, 2], "time_ms": [10, 20]}, [7], user=user, request_ms=1000)

    arguments = ("--log-features", str(tmp_path / "log"), "--log-key", str(tmp_path / "log.key"), "--log-sample", "1")
    result = serve_and_use(app, tmp_path, use, *arguments)
    assert result.exit_code == 0, result.exception
    (file,) = open_log(tmp_path / "log", key)
    records = list(file.records())
    assert [record.user for record in records] == [user_digest(key, user) for user in (5, 6)]
    assert records[0].features["history"].to_pylist()[0]["item"] == [1, 2]


def test_a_taken_port_is_told_before_the_bundle_is_read(app: typer.Typer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run(app, str(tmp_path / "absent"), "--port", str(other.getsockname()[1]))
    assert isinstance(result.exception, UsageError)
    assert "Address already in use" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "70000"], "port = 70000"),
        (["--max-queue", "0"], "max_queue = 0"),
        (["--timeout-ms", "-1"], "timeout_ms = -1"),
        (["--max-body-mib", "0"], "max_body_mib = 0"),
        (["--max-candidates", "0"], "max_candidates = 0"),
        (["--max-connections", "0"], "max_connections = 0"),
        (["--max-connections-per-address", "0"], "max_connections_per_address = 0"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s = -1"),
        (["--threads", "0"], "threads = 0"),
        (["--log-sample", "1.5"], "sample = 1.5"),
    ],
)
def test_settings_that_cannot_be(app: typer.Typer, arguments: list[str], part: str) -> None:
    result = run(app, "bundle", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert part in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--host", "0.0.0.0", "--port", "0"], "no token is set"),
        (["--host", "no.such.host.invalid", "--port", "0"], "is no address"),
        (["--token-file", "absent"], "cannot be read"),
        (["--port-file", "absent/port"], "its folder does not exist"),
        (["--log-features", "log"], "--log-features and --log-key go together"),
        (["--log-key", "key"], "--log-features and --log-key go together"),
        (["--log-features", "log", "--log-key", "absent"], "the key absent cannot be read"),
        (["--port", "0", "--port-file", "port"], "absent-bundle"),
    ],
)
def test_wrong_use_is_told(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACKBOARD_TOKEN", raising=False)
    result = run(app, "absent-bundle", *arguments)
    assert result.exception is not None
    assert part in str(result.exception)
    assert result.exception.exit_code in (2, 3)  # type: ignore[attr-defined]
    assert len(str(result.exception).splitlines()) <= 3
