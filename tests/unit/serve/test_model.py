from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import DataError
from tackboard.features.language import Context, Events, FeatureSet, Float, Item, String, sequence
from tackboard.features.serving_log import FeatureLog, open_log, user_digest
from tackboard.scoring.request import ScoreRequest
from tackboard.serve.errors import RequestError
from tackboard.serve.model import ServedModel
from tackboard.serve.protocol import ProtocolLimits, open_infer


def read(model: ServedModel, body: dict[str, Any]) -> ScoreRequest:
    opened = open_infer(json.dumps(body).encode(), None, ProtocolLimits())
    model.inputs.check(opened.declared)
    return model.inputs.read(opened.read())


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
    with pytest.raises(DataError, match="cannot be part of a URL"):
        ServedModel(scripted_scorer(name=name), max_candidates=4)


@pytest.mark.parametrize("scores", [np.array([1.0, np.nan]), np.array([1.0]), np.array([[1.0, 2.0]])])
def test_scores_that_are_no_scores_are_a_500(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]], scores: np.ndarray
) -> None:
    scorer = scripted_scorer()
    scorer.score_features = lambda features, candidates: scores
    model = ServedModel(scorer, max_candidates=4)
    with pytest.raises(RequestError) as caught:
        model.score(read(model, request_body([1, 2])))
    assert caught.value.status == 500


@pytest.mark.parametrize("id_type", ["int64", "string"])
def test_warming_up_scores_small_and_large_requests(scripted_scorer: Any, id_type: str) -> None:
    scorer = scripted_scorer(id_type=id_type)
    ServedModel(scorer, max_candidates=50).warm_up()
    sizes = {(len(request.history["item"]), len(request.candidate_items)) for request in scorer.seen}
    assert sizes == {(0, 1), (8, 50)}


KEY = bytes(range(32))
events = Events()
FEATURES = FeatureSet(
    "own",
    history=sequence(item=events.newest(8).collect(events.item)),
    price=Item(price=Float(minimum=0)).price,
    device=Context(device=String()).device,
)


def with_more(body: dict[str, Any], **more: tuple[str, list[Any]]) -> dict[str, Any]:
    """The body with further tensors, of (datatype, values), and without those that `FEATURES` does not read."""
    body["inputs"] = [e for e in body["inputs"] if e["name"] not in ("history_action", "history_surface")]
    for name, (datatype, values) in more.items():
        body["inputs"].append({"name": name, "datatype": datatype, "shape": [len(values)], "data": values})
    return body


def test_what_was_computed_is_logged(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    scorer = scripted_scorer(features=FEATURES)
    log = FeatureLog(tmp_path, FEATURES, KEY)
    model = ServedModel(scorer, max_candidates=10, log=log)
    model.warm_up()
    who_and_when = {"user": ("INT64", [77]), "request_time_ms": ("INT64", [5000])}
    more = {"candidate_price": ("FP64", [0.1, 0.2]), "context_device": ("BYTES", ["phone"])}
    for extra in (who_and_when, {"user": ("INT64", [77])}, {"request_time_ms": ("INT64", [5000])}, {}):
        model.score(read(model, with_more(request_body([1, 2]), **extra, **more)))
    assert log.close()
    assert model.log_counts() == {"logged": 1, "dropped": 0, "without_user_or_time": 3}
    (file,) = open_log(tmp_path, KEY)
    (record,) = file.records()
    assert (record.user, record.request_ms) == (user_digest(KEY, 77), 5000)
    assert record.item_ids.tolist() == [1, 2]
    assert record.features["price"].to_pylist() == [0.1, 0.2]
    assert record.context["device"].to_pylist() == ["phone"]
    assert record.features["history"].to_pylist() == [{"item": [5, 6]}]


def test_what_was_not_served_is_not_logged(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    scorer = scripted_scorer(features=FEATURES)
    log = FeatureLog(tmp_path, FEATURES, KEY)
    model = ServedModel(scorer, max_candidates=10, log=log)
    scorer.score_features = lambda features, candidates: np.array([np.nan, np.nan])
    body = with_more(request_body([1, 2]), user=("INT64", [77]), request_time_ms=("INT64", [5000]))
    with pytest.raises(RequestError):
        model.score(read(model, body))
    assert log.close()
    assert model.log_counts()["logged"] == 0


def test_features_that_cannot_be_computed_are_the_requests_fault(
    scripted_scorer: Any, request_body: Callable[..., dict[str, Any]]
) -> None:
    scorer = scripted_scorer()
    model = ServedModel(scorer, max_candidates=10)

    def refuse(request: Any) -> Any:
        raise DataError("feature price: item.price is out of range", allowed="declared range: 0 to 1")

    scorer.compute_features = refuse
    with pytest.raises(RequestError, match="feature price: item.price is out of range; declared range") as caught:
        model.score(read(model, request_body([1])))
    assert caught.value.status == 400
