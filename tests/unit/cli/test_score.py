from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tackboard.bundle.signature import Signature
from tackboard.cli.score import score
from tackboard.core.errors import ConfigError, UsageError
from tackboard.features.standard import standard_features
from tackboard.scoring.client import ScoringClient
from tackboard.scoring.request import RequestReader
from tackboard.scoring.scorer import Scorer

REQUEST = {"history": [{"item": 1, "action": "click", "surface": "home", "time_ms": 5}], "candidates": [10, 30, 20, 7]}


class IdScorer:
    """Scores an item by its last digit, then by its place."""

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
    reader = RequestReader(signature, standard_features(signature.vocabulary, 4))

    def score(self, request: Any) -> np.ndarray:
        return (request.candidate_items % 10).astype(np.float32)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(Scorer, "load", lambda bundle, code_file=None, num_threads=None: IdScorer())
    app = typer.Typer()
    app.command()(score)
    return app


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    return str(tmp_path / "request.json")


def run(app: typer.Typer, *arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=text)


def test_offline_says_what_training_never_saw(app: typer.Typer, request_file: str) -> None:
    assert "warning" not in run(app, request_file, "--offline", "--bundle", "b").stderr
    least = json.dumps({"history": [{"item": 1}, {"item": 2}], "candidates": [10, 30]})
    result = run(app, "-", "--offline", "--bundle", "b", text=least)
    for field in ("action", "surface", "time_ms"):
        assert f"warning: {field} of 2 events is missing or was never seen in training" in result.stderr


def test_offline_json_is_ranked_with_ties_as_given(app: typer.Typer, request_file: str) -> None:
    result = run(app, request_file, "--offline", "--bundle", "b", "--json")
    assert json.loads(result.stdout) == {
        "model": "digits",
        "num_candidates": 4,
        "ranked": [
            {"item": 7, "score": 7.0},
            {"item": 10, "score": 0.0},
            {"item": 30, "score": 0.0},
            {"item": 20, "score": 0.0},
        ],
    }


def test_a_table_of_the_best(app: typer.Typer) -> None:
    result = run(app, "-", "--offline", "--bundle", "b", "--top-k", "2", text=json.dumps(REQUEST))
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
    result = run(app, request_file, "--url", "http://127.0.0.1:9", "--json", *more)
    assert asked == [("http://127.0.0.1:9", [1], [10, 30, 20, 7], binary, None, None)]
    content = json.loads(result.stdout)
    assert content["model"] == "remote"
    assert [entry["item"] for entry in content["ranked"]] == [10, 30, 20, 7]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--offline"], "go together"),
        (["--bundle", "b"], "go together"),
        (["--offline", "--bundle", "b", "--binary"], "asks no server"),
        (["--offline", "--bundle", "b", "--url", "http://x"], "asks no server"),
        (["--code", "f.py"], "--code is for --offline"),
        (["--url", "ftp://x"], "no address of a server"),
        (["--url", "http://127.0.0.1:1"], "no tackboard server answers"),
    ],
)
def test_wrong_use_is_told(app: typer.Typer, request_file: str, arguments: list[str], part: str) -> None:
    result = run(app, request_file, *arguments)
    assert isinstance(result.exception, UsageError)
    assert part in str(result.exception)


def test_wrong_requests_are_told(app: typer.Typer, tmp_path: Path) -> None:
    offline = ("--offline", "--bundle", "b")
    result = run(app, str(tmp_path / "absent.json"), *offline)
    assert "cannot be read" in str(result.exception)
    result = run(app, str(tmp_path), *offline)
    assert "cannot be read" in str(result.exception)
    result = run(app, "-", *offline, text='{"history": [], "candidates": ["a"]}')
    assert isinstance(result.exception, UsageError)
    result = run(app, "-", *offline, text='{"history": [{"item": 1, "tim_ms": 1}], "candidates": [1]}')
    assert isinstance(result.exception, UsageError)
    assert "did you mean 'time_ms'?" in str(result.exception)
    result = run(app, "-", *offline, "--top-k", "0", text="{}")
    assert isinstance(result.exception, ConfigError)
