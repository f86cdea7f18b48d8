from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import DataError
from tackboard.serve.errors import RequestError
from tackboard.serve.model import ServedModel
from tackboard.serve.protocol import ProtocolLimits, parse_infer


def parse(body: dict[str, Any]) -> Any:
    return parse_infer(json.dumps(body).encode(), None, ProtocolLimits())


def test_the_request_becomes_ids_and_indices(scripted_scorer: Any, request_body: Callable[..., dict[str, Any]]) -> None:
    model = ServedModel(scripted_scorer(), max_candidates=10)
    request = model.read(parse(request_body([7, 8, 9], [1, 2])))
    assert request.candidate_items.tolist() == [7, 8, 9]
    assert request.history_items.tolist() == [1, 2]
    assert request.history_times_ms.tolist() == [0, 1000]


def test_string_ids_and_an_empty_history(scripted_scorer: Any, request_body: Callable[..., dict[str, Any]]) -> None:
    model = ServedModel(scripted_scorer(id_type="string"), max_candidates=10)
    request = model.read(parse(request_body(["a", "b"], [])))
    assert request.candidate_items.shape == (2,)
    assert request.history_items.shape == (0,)


def test_only_items_are_needed(scripted_scorer: Any, request_body: Callable[..., dict[str, Any]]) -> None:
    body = request_body([7], [1, 2])
    body["inputs"] = [entry for entry in body["inputs"] if entry["name"] in ("history_item", "candidate_item")]
    request = ServedModel(scripted_scorer(), max_candidates=10).read(parse(body))
    assert request.history_items.tolist() == [1, 2]
    assert request.history_times_ms.tolist() == [0, 0]


def _edit(which: str, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        next(entry for entry in body["inputs"] if entry["name"] == which).update(changes)

    return edit


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda body: body["inputs"].pop(), "candidate_item is missing"),
        (_edit("history_item", name="history_items"), "no input 'history_items'"),
        (_edit("history_time_ms", datatype="INT32"), "this model takes INT64"),
        (_edit("candidate_item", datatype="BYTES", data=["1", "2"]), "this model takes INT64"),
        (_edit("candidate_item", shape=[1, 2], data=[[1, 2]]), "2 dimensions; this model takes one"),
        (_edit("candidate_item", shape=[0], data=[]), "0 values; allowed: 1 to 4"),
        (_edit("candidate_item", shape=[5], data=[1, 2, 3, 4, 5]), "5 values; allowed: 1 to 4"),
        (_edit("history_action", shape=[1], data=["click"]), "history"),
    ],
)
def test_wrong_tensors_are_told(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]], edit: Callable[[dict[str, Any]], None], part: str
) -> None:
    body = request_body([1, 2])
    edit(body)
    with pytest.raises(RequestError, match=part) as caught:
        ServedModel(scripted_scorer(), max_candidates=4).read(parse(body))
    assert caught.value.status == 400


def test_descriptions_agree(scripted_scorer: Any) -> None:
    model = ServedModel(scripted_scorer(id_type="string"), max_candidates=4)
    metadata, config = model.metadata(), model.config()
    assert metadata["name"] == config["name"] == "scripted"
    assert metadata["platform"] == config["platform"] == "tackboard"
    assert metadata["versions"] == ["1"]
    assert config["max_batch_size"] == 0
    assert [entry["name"] for entry in metadata["inputs"]] == [entry["name"] for entry in config["input"]]
    assert {"name": "candidate_item", "datatype": "BYTES", "shape": [-1]} in metadata["inputs"]
    assert {"name": "candidate_item", "data_type": "TYPE_STRING", "dims": [-1], "optional": False} in config["input"]
    assert metadata["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\nb", "a\\b"])
def test_a_name_that_no_url_can_hold_is_refused(scripted_scorer: Any, name: str) -> None:
    with pytest.raises(DataError, match="cannot stand in a URL"):
        ServedModel(scripted_scorer(name=name), max_candidates=4)


@pytest.mark.parametrize("scores", [np.array([1.0, np.nan]), np.array([1.0]), np.array([[1.0, 2.0]])])
def test_scores_that_are_no_scores_are_a_500(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]], scores: np.ndarray
) -> None:
    scorer = scripted_scorer()
    scorer.score = lambda request: scores
    model = ServedModel(scorer, max_candidates=4)
    with pytest.raises(RequestError) as caught:
        model.score(model.read(parse(request_body([1, 2]))))
    assert caught.value.status == 500


@pytest.mark.parametrize("id_type", ["int64", "string"])
def test_warming_up_scores_small_and_large_requests(scripted_scorer: Any, id_type: str) -> None:
    scorer = scripted_scorer(id_type=id_type)
    ServedModel(scorer, max_candidates=50).warm_up()
    sizes = {(len(request.history_items), len(request.candidate_items)) for request in scorer.seen}
    assert sizes == {(0, 1), (8, 50)}
