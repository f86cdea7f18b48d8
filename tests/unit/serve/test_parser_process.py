from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import psutil
import pytest

from tackboard.features.column import differing_rows
from tackboard.features.language import (
    Bool,
    Events,
    FeatureSet,
    Float,
    Id,
    Item,
    List,
    String,
    Time,
    Vector,
    sequence,
)
from tackboard.serve.errors import RequestError
from tackboard.serve.inputs import ModelInputs
from tackboard.serve.parser_process import ParserProcess, serve_parser
from tackboard.serve.parsing import Body, RequestParser
from tackboard.serve.protocol import ProtocolLimits


class FailingParser(RequestParser):
    """A parser with a bug."""

    def parse(self, body: Body) -> Any:
        raise ValueError("user 4711")


@pytest.fixture
def parser(scripted_scorer: Any) -> RequestParser:
    return RequestParser(ModelInputs(scripted_scorer().reader, max_candidates=10_000), ProtocolLimits())


@pytest.fixture
def process(parser: RequestParser) -> Iterator[ParserProcess]:
    made = ParserProcess(parser)
    made.start()
    yield made
    made.stop()


def body_of(envelope: dict[str, Any], piece: int = 10_000) -> Body:
    text = json.dumps(envelope).encode()
    return Body([text[start : start + piece] for start in range(0, len(text), piece)])


def test_it_parses_as_we_do(
    process: ParserProcess, parser: RequestParser, request_body: Callable[..., dict[str, Any]]
) -> None:
    for envelope in (request_body(list(range(10_000)), list(range(500)), timeout=7), request_body([1])):
        found, expected = process.parse(body_of(envelope)), parser.parse(body_of(envelope))
        assert found.request == expected.request
        assert found.score_request.candidate_items.tolist() == expected.score_request.candidate_items.tolist()
        for name, column in expected.score_request.history.items():
            assert found.score_request.history[name].to_pylist() == column.to_pylist()
    with pytest.raises(RequestError, match="must be a JSON object") as caught:
        process.parse(Body([b"[]"]))
    assert caught.value.status == 400


def test_columns_of_every_kind_arrive_bit_for_bit(scripted_scorer: Any) -> None:
    item = Item(
        price=Float(), brand=Id(), taste=Vector(2), words=List(String), sold=Bool(), born=Time(), title=String()
    )
    events = Events(note=String())
    features = FeatureSet(
        "all",
        history=sequence(item=events.newest(8).collect(events.item)),
        note=events.last(events.note),
        **{name: getattr(item, name) for name in ("price", "brand", "taste", "words", "sold", "born", "title")},
    )
    parser = RequestParser(ModelInputs(scripted_scorer(features=features).reader, max_candidates=10), ProtocolLimits())
    given = {
        "history_item": ("INT64", [5, 6, 7]),
        "history_note": ("BYTES", ["a", "\u00e9", ""]),
        "candidate_item": ("INT64", [1, 2]),
        "candidate_price": ("FP64", [0.1, -0.0]),
        "candidate_brand": ("BYTES", ["acme", "b"]),
        "candidate_taste": ("FP32", [[0.1, 2], [3, 4]]),
        "candidate_words": ("BYTES", ['["a","b"]', "[]"]),
        "candidate_sold": ("BOOL", [True, False]),
        "candidate_sold_present": ("BOOL", [True, False]),
        "user": ("INT64", [9]),
        "request_time_ms": ("INT64", [1_700_000_000_000]),
    }
    entries = [
        {
            "name": name,
            "datatype": kind,
            "shape": [len(rows), 2] if name.endswith("taste") else [len(rows)],
            "data": rows,
        }
        for name, (kind, rows) in given.items()
    ]
    envelope = {"inputs": entries}
    process = ParserProcess(parser)
    try:
        found, expected = process.parse(body_of(envelope)).score_request, parser.parse(body_of(envelope)).score_request
    finally:
        process.stop()
    assert (found.user_id, found.request_ms) == (expected.user_id, expected.request_ms) == (9, 1_700_000_000_000)
    columns = [(found.history, expected.history)]
    columns += [(found.attributes[entity], expected.attributes[entity]) for entity in ("user", "item", "context")]
    for ours, theirs in columns:
        assert ours.keys() == theirs.keys()
        for name, column in theirs.items():
            assert ours[name].type == column.type
            assert len(differing_rows(ours[name], column)) == 0


def test_it_loads_little_and_ignores_the_signals_of_its_server(process: ParserProcess) -> None:
    pid = process.pid
    assert pid
    with pytest.raises(RequestError):
        process.parse(Body([b"[]"]))  # Now it runs, and has set its signals.
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in maps
    assert not [name for name in ("torch", "arrow", "polars") if name in maps]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    with pytest.raises(RequestError, match="JSON object"):
        process.parse(Body([b"[]"]))
    assert process.pid == pid


def test_one_that_dies_is_followed_by_another(
    process: ParserProcess, request_body: Callable[..., dict[str, Any]]
) -> None:
    envelope = request_body([1, 2])
    first = process.pid
    assert first
    os.kill(first, signal.SIGKILL)
    assert process._process
    assert process._process.wait(5) == -signal.SIGKILL
    assert process.parse(body_of(envelope)).score_request.candidate_items.tolist() == [1, 2]
    second = process.pid
    assert second
    assert second != first
    os.kill(second, signal.SIGSTOP)
    Timer(0.2, os.kill, (second, signal.SIGKILL)).start()
    with pytest.raises(RequestError, match="could not read") as caught:
        process.parse(body_of(envelope))
    assert caught.value.status == 500
    assert process.parse(body_of(envelope)).score_request.candidate_items.tolist() == [1, 2]


def test_one_that_hangs_is_ended(
    process: ParserProcess, request_body: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process.stop()
    monkeypatch.setattr("tackboard.serve.parser_process._STUCK_S", 1)
    hanging = ParserProcess(process._parser)
    hanging.start()
    pid = hanging.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="could not read"):
        hanging.parse(Body([bytes(1 << 20)] * 4))
    assert not psutil.pid_exists(pid)
    hanging.stop()


def test_it_ends_with_its_owner(process: ParserProcess) -> None:
    pid = process.pid
    assert pid
    process.stop()
    assert not psutil.pid_exists(pid)
    with pytest.raises(RequestError, match="could not read"):
        process.parse(Body([b"{}"]))
    process.stop()


def test_a_bug_is_told_by_its_place(parser: RequestParser) -> None:
    ours, theirs = Pipe()
    thread = Thread(target=serve_parser, args=(theirs,))
    thread.start()
    ours.send(FailingParser(parser.inputs, parser.limits))
    ours.send(("", None))
    ours.send_bytes(b"{}")
    ours.send_bytes(b"")
    status, message = ours.recv()
    ours.close()
    thread.join(5)
    assert not thread.is_alive()
    theirs.close()
    assert (status, "4711" in message) == (500, False)
    assert "ValueError at test_parser_process.py:" in message
