from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.serve.errors import RequestError
from tackboard.serve.protocol import (
    ProtocolLimits,
    build_response,
    check_outputs,
    decompress,
    open_infer,
)
from tackboard.serve.tensors import to_binary

LIMITS = ProtocolLimits(max_body_bytes=4 << 20)
HEAD = {"model_name": "m", "model_version": "1"}


def parse_infer(body: bytes, header_length: bytes | None, limits: ProtocolLimits, skipped: Any = ()) -> Any:
    """What is asked for, and the tensors as `inputs`."""
    opened = open_infer(body, header_length, limits, skipped)
    return SimpleNamespace(**dataclasses.asdict(opened.request), inputs=opened.read())


def parse(envelope: Any, raw: bytes | None = None) -> Any:
    text = json.dumps(envelope).encode()
    length = None if raw is None else str(len(text)).encode()
    return parse_infer(text + (raw or b""), length, LIMITS)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]} | changes


def test_a_json_request() -> None:
    request = parse({"id": "7", "inputs": [tensor()], "parameters": {"timeout": 50_000, "priority": 1, "mine": "x"}})
    assert (request.id, request.timeout_us, request.outputs, request.binary_by_default) == ("7", 50_000, {}, False)
    assert list(request.inputs["x"].values) == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=8),
)
def test_binary_and_json_requests_mean_the_same(numbers: list[int], words: list[str]) -> None:
    chunks = [to_binary("INT64", np.array(numbers, dtype=np.int64)), to_binary("BYTES", words)]
    shapes = {"a": ("INT64", len(numbers)), "b": ("BYTES", len(words))}
    as_json = parse(
        {
            "inputs": [
                {"name": name, "datatype": datatype, "shape": [count], "data": data}
                for (name, (datatype, count)), data in zip(shapes.items(), (numbers, words), strict=True)
            ]
        }
    )
    as_binary = parse(
        {
            "inputs": [
                {"name": name, "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": len(chunk)}}
                for (name, (datatype, count)), chunk in zip(shapes.items(), chunks, strict=True)
            ]
        },
        b"".join(chunks),
    )
    for name in shapes:
        assert list(as_json.inputs[name].values) == list(as_binary.inputs[name].values)
        assert as_json.inputs[name].shape == as_binary.inputs[name].shape


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_scores_survive_both_forms_exactly(values: list[float]) -> None:
    scores = np.array(values, dtype=np.float32)
    for binary in (False, True):
        request = parse({"inputs": [], "parameters": {"binary_data_output": binary}})
        body, length = build_response(HEAD, {"score": ("FP32", scores)}, request)
        output = json.loads(body[:length])["outputs"][0]
        assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [len(values)])
        if binary:
            assert output["parameters"] == {"binary_data_size": 4 * len(values)}
            found = np.frombuffer(body[length:], dtype=np.float32)
        else:
            assert length is None
            found = np.array(output["data"], dtype=np.float32)
        assert np.array_equal(found, scores)


def test_one_output_may_differ_from_the_default() -> None:
    outputs = [{"name": "score", "parameters": {"binary_data": False}}]
    request = parse({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert request.outputs == {"score": False}
    body, length = build_response(HEAD, {"score": ("FP32", np.ones(1, np.float32))}, request)
    assert length is None
    assert json.loads(body)["outputs"][0]["data"] == [1.0]
    assert parse(
        {"inputs": [], "outputs": [{"name": "score"}], "parameters": {"binary_data_output": True}}
    ).outputs == {"score": True}


def test_unknown_outputs_are_refused_before_any_work() -> None:
    request = parse({"inputs": [], "outputs": [{"name": "nope"}]})
    with pytest.raises(RequestError, match="no output 'nope'"):
        check_outputs(request, ("score",))


@pytest.mark.parametrize(
    ("envelope", "part"),
    [
        ([], "must be a JSON object"),
        ({}, "inputs must be a list of objects"),
        ({"inputs": [1]}, "inputs must be a list of objects"),
        ({"inputs": [{}]}, "needs a name"),
        ({"inputs": [tensor(name="")]}, "needs a name"),
        ({"inputs": [tensor(), tensor()]}, "'x' appears twice in inputs"),
        ({"inputs": [], "outputs": [{"name": "score"}, {"name": "score"}]}, "appears twice in outputs"),
        ({"inputs": [tensor(name=f"t{number}") for number in range(65)]}, "at most 64"),
        ({"inputs": [tensor(shape=[2**63 - 1])]}, "more elements"),
        ({"inputs": [tensor(shape=[3])]}, "2 values where its shape needs 3"),
        ({"inputs": [tensor(parameters=[])]}, "must be an object"),
        ({"inputs": [tensor(parameters={"binary_data_size": 16})]}, "both data and binary_data_size"),
        ({"inputs": [], "id": 7}, "id must be a string"),
        ({"inputs": [], "parameters": 1}, "must be an object"),
        ({"inputs": [], "parameters": {"timeout": "1s"}}, "microseconds"),
        ({"inputs": [], "parameters": {"timeout": -1}}, "microseconds"),
        ({"inputs": [], "parameters": {"timeout": True}}, "microseconds"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "true or false"),
    ],
)
def test_wrong_envelopes_are_told(envelope: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        parse(envelope)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "envelope",
    [
        {"inputs": [], "parameters": {"sequence_id": 1}},
        {"inputs": [tensor(parameters={"shared_memory_region": "r"})]},
        {"inputs": [], "outputs": [{"name": "score", "parameters": {"classification": 3}}]},
        {"inputs": [tensor(datatype="BF16")]},
    ],
)
def test_what_is_not_offered_answers_501(envelope: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(envelope)
    assert caught.value.status == 501


@pytest.mark.parametrize("text", [b"", b"{", b"[NaN]", b'{"inputs": [], "x": 1e999}', b"\xff", b"nul"])
def test_broken_json_is_told_without_its_text(text: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_infer(text, None, LIMITS)


def test_json_as_deep_as_allowed_passes() -> None:
    body = b'{"inputs":[],"parameters":{"x":' + b"[" * 30 + b"]" * 30 + b',"y":[[],[],[],[]]}}'
    assert parse_infer(body, None, LIMITS).inputs == {}


@pytest.mark.parametrize(
    ("length", "part"),
    [(b"9999", "number of bytes"), (b"-1", "number of bytes"), (b"a", "number of bytes"), (b"0", "raw bytes alone")],
)
def test_wrong_header_lengths(length: bytes, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        parse_infer(b'{"inputs":[]}', length, LIMITS)


@pytest.mark.parametrize("size", [15, 17, -1, "16", 16.0, True])
def test_binary_sizes_must_add_up(size: Any) -> None:
    entry = {"name": "x", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": size}}
    with pytest.raises(RequestError) as caught:
        parse({"inputs": [entry]}, bytes(16))
    assert caught.value.status == 400


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    with pytest.raises(RequestError, match="3 bytes that belong to no tensor"):
        parse({"inputs": [tensor()]}, b"abc")


def test_zero_timeout_means_the_default() -> None:
    assert parse({"inputs": [], "parameters": {"timeout": 0}}).timeout_us is None


def _headless(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", _headless), ("identity", bytes), ("", bytes)],
)
def test_compressed_bodies(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    plain = b'{"inputs": []}' * 100
    assert decompress(compress(plain), encoding, LIMITS) == plain


def test_a_bomb_is_stopped_at_the_ratio_and_at_the_limit() -> None:
    bomb = gzip.compress(bytes(64 << 20), 9)
    with pytest.raises(RequestError) as caught:
        decompress(bomb, "gzip", LIMITS)
    assert caught.value.status == 413
    noise = gzip.compress(np.random.default_rng(0).bytes(LIMITS.max_body_bytes + 1), 1)
    with pytest.raises(RequestError) as caught:
        decompress(noise, "gzip", LIMITS)
    assert caught.value.status == 413


def test_broken_compression() -> None:
    good = gzip.compress(b"{}")
    for bad in (good[:-3], good + b"x", b"plain", b""):
        with pytest.raises(RequestError) as caught:
            decompress(bad, "gzip", LIMITS)
        assert caught.value.status == 400
    with pytest.raises(RequestError) as caught:
        decompress(good, "br", LIMITS)
    assert caught.value.status == 415


def test_skipped_inputs_are_counted_and_not_decoded() -> None:
    """Their datatype, shape and values may be anything: nobody looks at them."""
    words = ["home", "é"]
    entries = [
        {"name": "skip", "datatype": "nonsense", "shape": "none", "data": words},
        {"name": "x", "datatype": "INT64", "shape": [1], "data": [7]},
    ]
    request = parse_infer(json.dumps({"inputs": entries}).encode(), None, LIMITS, {"skip"})
    assert list(request.inputs) == ["x"]
    assert request.skipped_bytes == len('["home","é"]'.encode())


def test_skipped_binary_inputs_keep_the_others_in_place() -> None:
    def entry(name: str, size: int) -> dict[str, object]:
        return {"name": name, "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": size}}

    head = json.dumps({"inputs": [entry("a", 8), entry("skip", 5), entry("b", 8)]}).encode()
    raw = (1).to_bytes(8, "little") + b"\xff" * 5 + (2).to_bytes(8, "little")
    request = parse_infer(head + raw, str(len(head)).encode(), LIMITS, {"skip"})
    assert {name: tensor.values.tolist() for name, tensor in request.inputs.items()} == {"a": [1], "b": [2]}
    assert request.skipped_bytes == 5
    head = json.dumps({"inputs": [entry("skip", 500)]}).encode()
    with pytest.raises(RequestError, match="binary_data_size that does not fit the body"):
        parse_infer(head + raw, str(len(head)).encode(), LIMITS, {"skip"})
