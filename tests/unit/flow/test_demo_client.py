"""Requests drawn from a dataset, and the comparison of their scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tackboard.core.errors import UsageError
from tackboard.features.language import Events, FeatureSet, Float, Item
from tackboard.flow import demo_client
from tackboard.flow.demo_client import (
    attributes_of_items,
    draw_requests,
    is_ready,
    largest_difference,
    require_client,
    scores_in_order,
    whole_request,
)
from tackboard.scoring.client import read_request
from tackboard.serve.protocol import ProtocolLimits, open_infer


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Six users with 1 to 6 events, and 40 items with string ids. One event, at 16, is received late, at 50."""
    users = [user for user in range(6) for _ in range(user + 1)]
    events: dict[str, Any] = {
        "user_id": users,
        "user": [f"user-{user}" for user in users],
        "item": [f"item-{index}" for index in range(len(users))],
        "action": ["save"] * len(users),
        "surface": ["home"] * len(users),
        "time_ms": list(range(len(users))),
        "received_ms": [50 if time == 16 else time for time in range(len(users))],
    }
    parquet.write_table(pa.table(events), tmp_path / "events.parquet", use_dictionary=True)
    parquet.write_table(pa.table({"item": [f"item-{index}" for index in range(40)]}), tmp_path / "items.parquet")
    return tmp_path


def test_requests_hold_what_is_known_of_one_user_right_after_the_last_event(dataset: Path) -> None:
    requests = draw_requests(dataset, num_requests=6, num_candidates=10)
    assert len(requests) == 6
    histories = sorted(tuple(request.history["time_ms"]) for request in requests)
    # User u owns the times from u(u+1)/2; what was received late is not known yet.
    assert histories == [(0,), (1, 2), (3, 4, 5), (6, 7, 8, 9), (10, 11, 12, 13, 14), (15, 17, 18, 19, 20)]
    for request in requests:
        newest = request.history["time_ms"][-1]
        assert request.history["item"][-1] == f"item-{newest}"
        assert request.request_time_ms == newest + 1
    assert {request.user for request in requests} == {f"user-{user}" for user in range(6)}


def test_an_event_that_is_still_on_its_way_is_not_known_even_if_it_is_the_last(tmp_path: Path) -> None:
    columns = {name: ["x"] * 2 for name in ("user", "item", "action", "surface")}
    events = pa.table({"user_id": [7, 7], "time_ms": [5, 9], "received_ms": [5, 12], **columns})
    parquet.write_table(events, tmp_path / "events.parquet")
    parquet.write_table(pa.table({"item": ["x"]}), tmp_path / "items.parquet")
    (request,) = draw_requests(tmp_path, num_requests=1, num_candidates=1)
    assert (request.history["time_ms"], request.request_time_ms) == ([5], 10)


def test_candidates_are_distinct_items_and_differ_between_users(dataset: Path) -> None:
    requests = draw_requests(dataset, num_requests=3, num_candidates=10)
    assert all(len(set(request.candidates)) == 10 for request in requests)
    assert requests[0].candidates != requests[1].candidates
    assert requests == draw_requests(dataset, num_requests=3, num_candidates=10), "the draw is the same every time"
    (repeated,) = draw_requests(dataset, num_requests=1, num_candidates=100)
    assert (len(repeated.candidates), len(set(repeated.candidates))) == (100, 40), "a small catalogue is repeated"


def test_a_request_becomes_a_document_of_events(dataset: Path) -> None:
    request = draw_requests(dataset, num_requests=1, num_candidates=2)[0]
    document = request.document()
    assert document["candidates"] == request.candidates
    assert [event["item"] for event in document["history"]] == request.history["item"]
    assert set(document["history"][0]) == {"item", "action", "surface", "time_ms"}
    assert (document["user"], document["request_time_ms"]) == (request.user, request.request_time_ms)
    found = read_request(json.dumps(document))
    assert found.history == request.history
    assert (found.more["user"], found.more["request_ms"]) == (request.user, request.request_time_ms)


@pytest.fixture
def dataset_with_attributes(dataset: Path) -> Path:
    """The same, and item k has the price k + 0.5 and the vector (k, -k)."""
    items = {"item": [f"item-{index}" for index in range(40)], "price": [index + 0.5 for index in range(40)]}
    vectors = [[float(index), -float(index)] for index in range(40)]
    parquet.write_table(pa.table(items | {"content": vectors}), dataset / "items.parquet")
    return dataset


def test_candidates_bring_the_attributes_that_the_model_reads(dataset_with_attributes: Path) -> None:
    (request,) = draw_requests(
        dataset_with_attributes, num_requests=1, num_candidates=5, attributes=("content", "price")
    )
    numbers = [int(item.removeprefix("item-")) for item in request.candidates]
    vectors = [[number, -number] for number in numbers]
    assert request.attributes == {
        "candidate_price": [number + 0.5 for number in numbers],
        "candidate_content": vectors,
    }
    assert read_request(json.dumps(request.document())).more["attributes"] == request.attributes
    datatypes = {f"history_{name}": "BYTES" for name in ("item", "action", "surface")}
    datatypes |= {"history_time_ms": "INT64", "request_time_ms": "INT64", "candidate_item": "BYTES"}
    datatypes |= {"candidate_price": "FP64", "candidate_content": "FP32"}
    head, _, body = whole_request("demo", request, datatypes, timeout_us=1000).partition(b"\r\n\r\n")
    headers = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    tensors = open_infer(body, headers["Inference-Header-Content-Length"].encode(), ProtocolLimits()).read()
    assert tensors["candidate_content"].shape == (5, 2)
    assert np.array(tensors["candidate_content"].values).reshape(5, 2).tolist() == vectors
    assert list(tensors["candidate_price"].values) == request.attributes["candidate_price"]


def test_a_bundle_says_which_attributes_of_items_its_model_reads(tmp_path: Path) -> None:
    assert attributes_of_items(tmp_path) == (), "a bundle from before features"
    features = FeatureSet("three", price=Item(price=Float()).price, num=Events().count(), same=Item().id == 7)
    features.write(tmp_path)
    assert attributes_of_items(tmp_path) == ("price",)


def test_a_ranking_goes_back_into_the_order_of_its_candidates() -> None:
    ranked = [{"item": "b", "score": 2.0}, {"item": "a", "score": 1.0}]
    assert scores_in_order(ranked, ["a", "b", "a"]).tolist() == [1.0, 2.0, 1.0]
    assert np.isnan(scores_in_order(ranked, ["c"])).all()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.0, -1.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([1.0], [1.0, 2.0], np.inf),
        ([np.nan], [np.nan], np.inf),
        ([], [], 0.0),
    ],
)
def test_difference_is_a_share_of_the_largest_score(left: list[float], right: list[float], expected: float) -> None:
    assert largest_difference(np.array(left, dtype=np.float32), np.array(right, dtype=np.float32)) == expected


def test_a_port_where_nobody_listens_is_not_ready() -> None:
    assert is_ready(9) is False


def test_a_missing_client_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    require_client()
    monkeypatch.setattr(demo_client.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install 'tritonclient"):
        require_client()


def test_a_whole_request_is_what_the_server_reads(dataset: Path) -> None:
    (request,) = draw_requests(dataset, num_requests=1, num_candidates=3)
    datatypes = {f"history_{name}": "BYTES" for name in ("item", "action", "surface")}
    datatypes |= {"history_time_ms": "INT64", "request_time_ms": "INT64", "candidate_item": "BYTES"}
    head, _, body = whole_request("demo", request, datatypes, timeout_us=200_000).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ") for line in lines)
    assert first == "POST /v2/models/demo/infer HTTP/1.1"
    assert int(headers["Content-Length"]) == len(body)
    opened = open_infer(body, headers["Inference-Header-Content-Length"].encode(), ProtocolLimits())
    assert opened.request.timeout_us == 200_000
    assert list(opened.read()["candidate_item"].values) == request.candidates
    assert opened.request.outputs == {"score": True}
