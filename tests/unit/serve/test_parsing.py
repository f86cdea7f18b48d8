from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tackboard.features.column import Column, differing_rows
from tackboard.features.language import Events, FeatureSet, Int, Item, List, sequence
from tackboard.serve.errors import RequestError
from tackboard.serve.inputs import ModelInputs
from tackboard.serve.parsing import Body, Parsed, RequestParser
from tackboard.serve.protocol import ProtocolLimits
from tackboard.serve.tensors import to_binary

Requests = Callable[..., dict[str, Any]]


@pytest.fixture
def parser(scripted_scorer: Any) -> Callable[..., RequestParser]:
    def make(**scorer: Any) -> RequestParser:
        return RequestParser(ModelInputs(scripted_scorer(**scorer).reader, max_candidates=10_000), ProtocolLimits())

    return make


def admit_all(_num_candidates: int, _timeout_us: int | None) -> None:
    """Refuses nobody."""


def plain(envelope: dict[str, Any]) -> Body:
    return Body([json.dumps(envelope).encode()])


def binary(envelope: dict[str, Any]) -> Body:
    """The same request with raw bytes behind the JSON."""
    chunks = []
    entries = []
    for entry in envelope["inputs"]:
        values = entry["data"] if entry["datatype"] == "BYTES" else np.array(entry["data"], dtype=np.int64)
        chunks.append(to_binary(entry["datatype"], values))
        rest = {key: value for key, value in entry.items() if key != "data"}
        entries.append({**rest, "parameters": {"binary_data_size": len(chunks[-1])}})
    head = json.dumps({**envelope, "inputs": entries}).encode()
    return Body([head, *chunks], header_length=str(len(head)).encode())


def zipped(envelope: dict[str, Any]) -> Body:
    return Body([gzip.compress(json.dumps(envelope).encode())], encoding="gzip")


def assert_same(one: Parsed, other: Parsed) -> None:
    assert one.request == other.request
    assert np.array_equal(one.score_request.candidate_items, other.score_request.candidate_items)
    assert one.score_request.request_ms == other.score_request.request_ms
    assert one.score_request.history.keys() == other.score_request.history.keys()
    for name, column in one.score_request.history.items():
        found: Column = other.score_request.history[name]
        assert column.type == found.type
        assert len(differing_rows(column, found)) == 0


@pytest.mark.parametrize("form", [plain, binary, zipped])
@pytest.mark.parametrize("candidates", [[7, 8, 9], ["a", "b"]])
def test_cheap_bodies_mean_what_they_mean_otherwise(
    parser: Callable[..., RequestParser], request_body: Requests, form: Any, candidates: list[Any]
) -> None:
    text = isinstance(candidates[0], str)
    model = parser(id_type="string" if text else "int64")
    body = form({"id": "x", **request_body(candidates, ["u", "v"] if text else [3, 4], timeout=5000)})
    cheap = model.parse_cheap(body, admit_all)
    assert cheap is not None
    assert_same(cheap, model.parse(body))
    assert model.timeout_hint_us(body) == cheap.request.timeout_us == 5000


@pytest.mark.parametrize(
    ("candidates", "history", "form"),
    [
        (list(range(10**18, 10**18 + 4000)), [1], plain),
        (list(range(10**18, 10**18 + 4000)), [1], zipped),
        ([1] * 9_900, list(range(2000)), plain),
        ([f"i{number}" for number in range(2000)], ["a"], plain),
        ([f"i{number}" for number in range(2000)], ["a"], binary),
        ([1], list(range(900)), binary),
        ([1], list(range(9000)), binary),
    ],
    ids=["JSON bytes", "compressed", "JSON values", "texts", "texts, binary", "events", "bytes"],
)
def test_what_is_large_is_left_to_others(
    parser: Callable[..., RequestParser],
    request_body: Requests,
    candidates: list[Any],
    history: list[Any],
    form: Any,
) -> None:
    model = parser(id_type="string" if isinstance(candidates[0], str) else "int64")
    body = form(request_body(candidates, history))
    assert model.parse_cheap(body, admit_all) is None
    assert len(model.parse(body).score_request.candidate_items) == len(candidates)
    assert model.timeout_hint_us(body) is None


def test_a_thousand_candidates_are_cheap(parser: Callable[..., RequestParser], request_body: Requests) -> None:
    history = list(range(100))
    numbers = request_body(list(range(10**18, 10**18 + 1000)), history)
    texts = request_body([str(uuid.UUID(int=number)) for number in range(1000)], [str(number) for number in history])
    for form in (plain, binary, zipped):
        assert parser().parse_cheap(form(numbers), admit_all)
        assert parser(id_type="string").parse_cheap(form(texts), admit_all)
    assert parser().parse_cheap(binary(request_body(list(range(10_000)), [])), admit_all)


def test_brackets_and_lists_are_weighed(parser: Callable[..., RequestParser]) -> None:
    assert parser().parse_cheap(Body([b'{"inputs":[' + b"[]," * 4000 + b"[]]}"]), admit_all) is None
    events = Events()
    features = FeatureSet(
        "own", history=sequence(item=events.newest(8).collect(events.item)), tags=Item(tags=List(Int)).tags
    )
    model = parser(features=features)
    for count, is_cheap in ((100, True), (5000, False)):
        entries = [
            {"name": "history_item", "datatype": "INT64", "shape": [0], "data": []},
            {"name": "candidate_item", "datatype": "INT64", "shape": [1], "data": [1]},
            {"name": "candidate_tags", "datatype": "BYTES", "shape": [1], "data": [json.dumps([1] * count)]},
        ]
        for body in (plain({"inputs": entries}), binary({"inputs": entries})):
            assert (model.parse_cheap(body, admit_all) is not None) == is_cheap
            (column,) = model.parse(body).score_request.attributes["item"].values()
            assert column.to_pylist() == [[1] * count]


def test_what_is_declared_is_refused_before_a_value_is_read(
    parser: Callable[..., RequestParser], request_body: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.serve.protocol.OpenBody.read", lambda _opened: pytest.fail("a value was read"))
    model = parser(id_type="string")
    history, candidates = 0, -1
    wrong: list[tuple[int, dict[str, Any], str]] = [
        (candidates, {"name": "candidate_itm"}, "there is no input 'candidate_itm'"),
        (candidates, {"datatype": "INT64"}, "this model takes BYTES"),
        (candidates, {"shape": [1, 2]}, "2 dimensions; this model takes one"),
        (candidates, {"shape": [0]}, "0 values; allowed: 1 to 10000"),
        (candidates, {"shape": [10_001]}, "10001 values; allowed: 1 to 10000"),
        (candidates, {"shape": [9_000_000]}, "more elements than the 8,000,000 allowed"),
        (history, {"shape": [100_001]}, "at most 100000 events are allowed"),
    ]
    for place, change, part in wrong:
        envelope = request_body(["a", "b"], ["c"])
        envelope["inputs"][place] |= change
        with pytest.raises(RequestError, match=part) as caught:
            model.parse(plain(envelope))
        assert caught.value.status == 400
    for shape, size in (([2], 7), ([10_000], 39_999)):
        sizes = request_body(["a", "b"], ["c"])
        sizes["inputs"][-1] |= {"shape": shape, "parameters": {"binary_data_size": size}}
        del sizes["inputs"][-1]["data"]
        head = json.dumps(sizes).encode()
        with pytest.raises(RequestError, match=f"{size} bytes; its shape needs {4 * shape[0]} or more"):
            model.parse(Body([head, bytes(size)], header_length=str(len(head)).encode()))
    with pytest.raises(RequestError, match="no output 'nope'"):
        model.parse(plain({**request_body(["a"]), "outputs": [{"name": "nope"}]}))


def test_hints_of_a_timeout(parser: Callable[..., RequestParser]) -> None:
    model, filler = parser(), b" " * 100_000
    assert model.timeout_hint_us(Body([b'{"parameters": {"timeout" : 70}, "inputs": []}', filler])) == 70
    assert model.timeout_hint_us(Body([filler, b'{"parameters": {"timeout":70}}'])) == 70
    assert model.timeout_hint_us(Body([filler, b'{"timeout":70}'], header_length=b"5")) is None
    assert model.timeout_hint_us(Body([b'{"timeout": 0}'])) is None
    assert model.timeout_hint_us(Body([b'{"timeout": 5, "timeout": 9}'])) == 9
    assert model.timeout_hint_us(Body([gzip.compress(b'{"timeout": 6}' + filler)], encoding="gzip")) == 6
    assert model.timeout_hint_us(Body([b"noise"], encoding="gzip")) is None
    assert model.timeout_hint_us(Body([b'{"timeout": 6}'], encoding="identity")) == 6


def test_a_model_that_reads_more_events_takes_more(scripted_scorer: Any) -> None:
    reader = scripted_scorer().reader
    assert ModelInputs(reader, max_candidates=1, max_events=3).max_events == reader.signature.max_history
    assert ModelInputs(reader, max_candidates=1).max_events == 100_000


def test_who_is_not_admitted_is_refused_before_a_value_is_read(
    parser: Callable[..., RequestParser], request_body: Requests
) -> None:
    asked = []

    def refuse(num_candidates: int, timeout_us: int | None) -> None:
        asked.append((num_candidates, timeout_us))
        raise RequestError(429, "no time")

    envelope = request_body([1, 2, 3], [4, 5]) | {"parameters": {"timeout": 70_000}}
    envelope["inputs"][0]["data"] = ["not", "numbers"]
    body = plain(envelope)
    with pytest.raises(RequestError, match="no time"):
        parser().parse_cheap(body, refuse)
    assert asked == [(3, 70_000)]
    with pytest.raises(RequestError, match="must be int"):
        parser().parse_cheap(body, admit_all)
