"""`tackboard serve` and `tackboard score` in this process, with a scripted scorer in the place of a bundle."""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
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
from tackboard.cli.serve import score, serve
from tackboard.core.errors import ConfigError, UsageError
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.serving_log import open_log, user_digest
from tackboard.features.standard import standard_features
from tackboard.scoring.client import ScoringClient
from tackboard.scoring.request import RequestReader
from tackboard.scoring.scorer import Scorer

REQUEST = {"history": [{"item": 1, "action": "click", "surface": "home", "time_ms": 5}], "candidates": [10, 30, 20, 7]}


class DigitScorer:
    """Scores an item by its last digit."""

    signature = Signature(
        format_version=1,
        name="digits",
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
        return (candidate_items % 10).astype(np.float32)

    def score(self, request: Any) -> np.ndarray:
        return self.score_features(None, request.candidate_items)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every bundle is the `DigitScorer`; the bundles that were loaded, with their settings."""
    asked: list[Any] = []

    def load(bundle: Path, code_file: Path | None = None, num_threads: int | None = None) -> DigitScorer:
        asked.append((bundle, code_file, num_threads))
        return DigitScorer()

    monkeypatch.setattr(Scorer, "load", load)
    return asked


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(serve)
    app.command()(score)
    return app


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    return str(tmp_path / "request.json")


def run(app: typer.Typer, *arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=text)


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
    result = run(app, "serve", str(folder), "--port", "0", "--port-file", str(port_file), *arguments)
    user.join(10)
    assert not port_file.exists()
    return result


def test_it_serves_until_it_is_told_to_stop(
    app: typer.Typer, tmp_path: Path, loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACKBOARD_TOKEN", "a-token-of-32-characters-0123456")
    answers: list[Any] = []

    def use(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        for headers in ({}, {"Authorization": "Bearer a-token-of-32-characters-0123456"}):
            connection.request("GET", "/v2/models/digits", headers=headers)
            response = connection.getresponse()
            answers.append((response.status, json.loads(response.read())))
        connection.close()

    result = serve_and_use(app, tmp_path, use, "--threads", "2")
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("serving digits on http://127.0.0.1:")
    assert len(result.stdout.splitlines()) == 1
    assert loaded == [(tmp_path, None, 2)]
    assert [status for status, _ in answers] == [401, 200]
    assert answers[1][1]["name"] == "digits"
    assert gc.get_freeze_count() > 0, "the loop must not look for garbage in all that was loaded"
    gc.unfreeze()


def test_features_are_logged_where_it_is_told_to(
    app: typer.Typer, tmp_path: Path, loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (["--context-cache-mib", "-1"], "context_cache_mib = -1"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s = -1"),
        (["--threads", "0"], "threads = 0"),
        (["--log-sample", "1.5"], "sample = 1.5"),
    ],
)
def test_settings_that_cannot_be(app: typer.Typer, arguments: list[str], part: str) -> None:
    result = run(app, "serve", "bundle", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert part in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "b", "--port-file", "absent/port"], "its folder does not exist"),
        (["serve", "b", "--log-features", "log"], "--log-features and --log-key go together"),
        (["serve", "b", "--log-key", "key"], "--log-features and --log-key go together"),
        (["score", "r.json", "--offline"], "go together"),
        (["score", "r.json", "--bundle", "b"], "go together"),
        (["score", "r.json", "--offline", "--bundle", "b", "--binary"], "does not ask a server"),
        (["score", "r.json", "--offline", "--bundle", "b", "--url", "http://x"], "does not ask a server"),
        (["score", "r.json", "--code", "f.py"], "--code works only with --offline"),
        (["score", "r.json", "--top-k", "0"], "top_k = 0"),
    ],
)
def test_options_that_do_not_go_together(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(app, *arguments)
    assert isinstance(result.exception, UsageError)
    assert part in str(result.exception)
    assert len(str(result.exception).splitlines()) <= 3


def test_offline_says_what_training_never_saw(app: typer.Typer, request_file: str, loaded: list[Any]) -> None:
    assert "warning" not in run(app, "score", request_file, "--offline", "--bundle", "b").stderr
    least = json.dumps({"history": [{"item": 1}, {"item": 2}], "candidates": [10, 30]})
    result = run(app, "score", "-", "--offline", "--bundle", "b", text=least)
    for field in ("action", "surface", "time_ms"):
        assert f"warning: {field} of 2 events is missing or was never seen in training" in result.stderr


def test_candidates_are_ranked_with_ties_as_given(app: typer.Typer, request_file: str, loaded: list[Any]) -> None:
    result = run(app, "score", request_file, "--offline", "--bundle", "b", "--json")
    content = json.loads(result.stdout)
    assert (content["model"], content["num_candidates"]) == ("digits", 4)
    assert [(entry["item"], entry["score"]) for entry in content["ranked"]] == [(7, 7), (10, 0), (30, 0), (20, 0)]
    result = run(app, "score", request_file, "--offline", "--bundle", "b", "--top-k", "2")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [["rank", "item", "score"], ["1", "7", "7.000000"], ["2", "10", "0.000000"]]


@pytest.mark.parametrize("binary", [False, True])
def test_a_server_is_asked(app: typer.Typer, request_file: str, monkeypatch: pytest.MonkeyPatch, binary: bool) -> None:
    asked: list[Any] = []

    def answer(self: ScoringClient, history: Any, candidates: Any, *, binary: bool, **more: Any) -> np.ndarray:
        asked.append((self.url, history["item"], candidates, binary, more.get("request_ms"), more.get("user")))
        self.model = "remote"
        return np.array([4, 3, 2, 1], dtype=np.float32)

    monkeypatch.setattr(ScoringClient, "score", answer)
    more = ["--binary"] if binary else []
    result = run(app, "score", request_file, "--url", "http://127.0.0.1:9", "--json", *more)
    assert asked == [("http://127.0.0.1:9", [1], [10, 30, 20, 7], binary, None, None)]
    content = json.loads(result.stdout)
    assert content["model"] == "remote"
    assert [entry["item"] for entry in content["ranked"]] == [10, 30, 20, 7]
