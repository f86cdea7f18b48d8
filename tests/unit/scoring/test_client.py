"""The small client against a real server with a scripted scorer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from tackboard.bundle.signature import Signature
from tackboard.core.errors import TackboardError, UsageError
from tackboard.features.column import Column
from tackboard.features.language import Events, FeatureSet, Int, String, User
from tackboard.features.standard import standard_features
from tackboard.scoring.client import ScoringClient, read_request
from tackboard.scoring.request import RequestReader, ScoreRequest
from tackboard.serve.server import ServeConfig, Server

HISTORY = {"item": [1, 2], "action": ["click", "save"], "surface": ["home", "new"], "time_ms": [5, 6]}
TOKEN = "a-token-of-32-characters-0123456"


class CountingScorer:
    """Scores by position, shifted by the length of the history; fails on 13 candidates."""

    def __init__(self, id_type: Literal["int64", "string"]) -> None:
        self.signature = Signature(
            format_version=1,
            name="two words",
            version="1",
            id_type=id_type,
            actions=("click",),
            surfaces=("home",),
            max_history=8,
            model={},
            tables={},
            lineage={},
        )
        own = FeatureSet(
            "own",
            country=User(country=String()).country.fill_missing("").hash_id(),
            dwell=Events(dwell_ms=Int()).sum(Events(dwell_ms=Int()).dwell_ms.fill_missing(0)),
        )
        vocabulary = self.signature.vocabulary
        self.reader = RequestReader(self.signature, own.merged(standard_features(vocabulary, 8)))
        self.seen: list[ScoreRequest] = []

    def compute_features(self, request: ScoreRequest) -> dict[str, Column]:
        self.seen.append(request)
        return {"item": request.history["item"]}

    def score_features(self, features: Mapping[str, Column], candidate_items: np.ndarray) -> np.ndarray:
        if len(candidate_items) == 13:
            raise ValueError("13")
        return np.arange(len(candidate_items), dtype=np.float32) / 3 + len(features["item"])


class Served(NamedTuple):
    """A running server."""

    url: str
    id_type: str
    scorer: CountingScorer


@pytest.fixture(scope="module", params=["int64", "string"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    ready = threading.Event()
    config = ServeConfig(port=0, token=TOKEN)
    scorer = CountingScorer(request.param)
    server = Server(scorer, config, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(10)
    yield Served(server.url, request.param, scorer)
    server.drain()
    thread.join(10)


@pytest.mark.parametrize("binary", [False, True])
def test_scores_come_back_in_order(served: Served, binary: bool) -> None:
    url, id_type, _ = served
    client = ScoringClient(url, token=TOKEN)
    history: dict[str, list[Any]] = dict(HISTORY)
    candidates: list[Any] = [7, 8, 9, 7]
    if id_type == "string":
        history["item"], candidates = ["a", "b"], ["é", "x", "y", "é"]
    scores = client.score(history, candidates, binary=binary)
    assert scores.dtype == np.float32
    assert np.array_equal(scores, np.arange(4, dtype=np.float32) / 3 + 2)
    assert client.model == "two words"
    assert np.array_equal(client.score({"item": []}, candidates, binary=binary), np.arange(4, dtype=np.float32) / 3)


@pytest.mark.parametrize("binary", [False, True])
def test_the_servers_sentence_reaches_the_user(served: Served, binary: bool) -> None:
    url, id_type, _ = served
    client = ScoringClient(url, token=TOKEN)
    wrong, right = ("a", 1) if id_type == "int64" else (1, "a")
    with pytest.raises(UsageError, match="candidate_item"):
        client.score({"item": []}, [wrong], binary=binary)
    with pytest.raises(UsageError, match=r"\(400\)"):
        client.score({"item": [], "time_ms": [1]}, [right], binary=binary)
    with pytest.raises(TackboardError, match="the server failed") as caught:
        client.score({"item": []}, [right] * 13, binary=binary)
    assert caught.value.exit_code == 1


def test_the_token_is_needed(served: Served) -> None:
    with pytest.raises(UsageError, match=r"\(401\)"):
        ScoringClient(served[0]).score({"item": []}, [1])


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UsageError, match=f"no tackboard server answers at http://127.0.0.1:{port}"):
        ScoringClient(f"http://127.0.0.1:{port}").score({"item": []}, [1])


def test_someone_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UsageError, match=r"\(418\): the answer is not from a tackboard server"):
            ScoringClient(f"127.0.0.1:{other.getsockname()[1]}").score({"item": []}, [1])
        thread.join(5)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1",
        "http://",
        "",
        "http://127.0.0.1:port",
        "http://x:99999",
        "not a url",
        "http://exa mple:80",
        "http://[::1",
        "http://user:secret@127.0.0.1:1",
    ],
)
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(UsageError, match="not an address of a server"):
        ScoringClient(url)


def test_a_request_file_becomes_columns() -> None:
    events = [{"item": 1, "action": "click", "surface": "home", "time_ms": 5}]
    history, candidates, more = read_request(json.dumps({"history": events, "candidates": [3, 4]}))
    assert history == {"item": [1], "action": ["click"], "surface": ["home"], "time_ms": [5]}
    assert candidates == [3, 4]
    assert more.get("attributes", {}) == {}
    assert not {"request_ms", "user"} & set(more)
    assert read_request('{"history": [{"item": "a"}, {"item": "b"}], "candidates": ["c"]}')[0] == {"item": ["a", "b"]}
    assert read_request('{"history": [], "candidates": [1]}')[0]["item"] == []


def test_a_request_file_may_hold_more() -> None:
    text = {
        "history": [{"item": 1, "dwell_ms": 7}, {"item": 2, "dwell_ms": None}],
        "candidates": [3],
        "request_time_ms": 99,
        "user": "anna",
        "attributes": {"user_country": ["de"], "candidate_price": [None]},
    }
    found = read_request(json.dumps(text))
    assert found.history == {"item": [1, 2], "dwell_ms": [7, None]}
    assert found.more == {"request_ms": 99, "user": "anna", "attributes": text["attributes"]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"history": []}', "lacks candidates"),
        ('{"history": [], "candidate": []}', "did you mean 'candidates'"),
        ('{"history": {}, "candidates": []}', "must be lists"),
        ('{"history": [1], "candidates": []}', "event 0 is not an object"),
        ('{"history": [{"action": "x"}], "candidates": []}', "event 0 lacks item"),
        ('{"history": [{"item": 1}, {"item": 2, "dwell": 3}], "candidates": []}', "event 1 has the unknown key"),
        ('{"history": [], "candidates": [], "request_time": 1}', "did you mean 'request_time_ms'"),
        ('{"history": [], "candidates": [], "attributes": [1]}', "attributes must map each name to a list"),
        ('{"history": [], "candidates": [], "attributes": {"user_country": "de"}}', "must map each name to a list"),
        ('{"history": [{"item": 1, "time_ms": 1}, {"item": 2}], "candidates": []}', "event 1 lacks time_ms"),
    ],
)
def test_wrong_request_files_are_told(text: str | bytes, part: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        read_request(text)
    assert len(str(caught.value).splitlines()) <= 3
