"""The tensors of a model whose features read everything there is, and of one that reads next to nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tackboard.core.hashing import string_id
from tackboard.features.language import (
    Bool,
    Context,
    Events,
    FeatureSet,
    Float,
    Id,
    Int,
    Item,
    List,
    Request,
    String,
    Time,
    User,
    Vector,
    milliseconds,
    sequence,
)
from tackboard.scoring.client import ScoringClient
from tackboard.scoring.request import RequestReader, ScoreRequest
from tackboard.serve.errors import RequestError
from tackboard.serve.inputs import ModelInputs
from tackboard.serve.tensors import Tensor, from_json

item = Item(price=Float(minimum=0), brand=Id(), taste=Vector(2), words=List(String), sold=Bool(), born=Time())
user = User(country=String(), friends=List(Id), age=Int())
events, context, request = Events(dwell_ms=Int(), note=String()), Context(device=String()), Request()
EVERYTHING = FeatureSet(
    "everything",
    history=sequence(item=events.newest(8).collect(events.item)),
    clicks=events.where(events.action == "click").count(),
    price=item.price,
    brand=item.brand,
    taste=item.taste,
    words=item.words,
    sold=item.sold,
    born=item.born,
    country=user.country,
    friends=user.friends,
    age=user.age,
    me=user.id,
    dwell=events.sum(events.dwell_ms.fill_missing(0)),
    note=events.last(events.note),
    device=context.device,
    hour=request.time.hour(),
    recent=events.within(milliseconds(1000)).count(),
)
LITTLE = FeatureSet("little", history=sequence(item=events.newest(8).collect(events.item)))


@pytest.fixture
def inputs(scripted_scorer: Any) -> Callable[..., ModelInputs]:
    def make(features: FeatureSet = EVERYTHING, id_type: str = "int64") -> ModelInputs:
        return ModelInputs(scripted_scorer(features=features, id_type=id_type).reader, max_candidates=10)

    return make


def tensors(**given: tuple[str, list[Any]]) -> dict[str, Tensor]:
    """Tensors by name, of (datatype, rows); what every request needs is added."""
    always = {
        "history_item": ("INT64", [3, 4]),
        "history_time_ms": ("INT64", [10, 20]),
        "candidate_item": ("INT64", [7, 8, 9]),
        "user": ("INT64", [5]),
        "request_time_ms": ("INT64", [1000]),
    }
    found = {}
    for name, (datatype, rows) in (always | given).items():
        width = [len(rows[0])] if rows and isinstance(rows[0], list) else []
        found[name] = from_json(name, datatype, (len(rows), *width), rows)
    return found


def read(model: ModelInputs, **given: tuple[str, list[Any]]) -> ScoreRequest:
    return checked(model, tensors(**given))


def checked(model: ModelInputs, given: dict[str, Tensor]) -> ScoreRequest:
    model.check(given)
    return model.read(given)


def test_names_and_datatypes_follow_from_the_features(inputs: Callable[..., ModelInputs]) -> None:
    found = {name: (entry.datatypes[0], entry.shape, entry.optional) for name, entry in inputs().inputs.items()}
    masks = {name for name in found if name.endswith("_present")}
    assert {name.removesuffix("_present") for name in masks} == {
        *("candidate_price", "candidate_brand", "candidate_taste", "candidate_words", "candidate_sold"),
        *("candidate_born", "user_country", "user_friends", "user_age"),
        *("history_dwell_ms", "history_note", "context_device"),
    }
    assert {name: entry for name, entry in found.items() if name not in masks} == {
        "history_item": ("INT64", [-1], False),
        "history_action": ("BYTES", [-1], True),
        "history_time_ms": ("INT64", [-1], False),
        "candidate_item": ("INT64", [-1], False),
        "request_time_ms": ("INT64", [-1], False),
        "user": ("INT64", [-1], False),
        "history_dwell_ms": ("INT64", [-1], True),
        "history_note": ("BYTES", [-1], True),
        "candidate_price": ("FP64", [-1], True),
        "candidate_brand": ("INT64", [-1], True),
        "candidate_taste": ("FP32", [-1, 2], True),
        "candidate_words": ("BYTES", [-1], True),
        "candidate_sold": ("BOOL", [-1], True),
        "candidate_born": ("INT64", [-1], True),
        "user_country": ("BYTES", [-1], True),
        "user_friends": ("BYTES", [-1], True),
        "user_age": ("INT64", [-1], True),
        "context_device": ("BYTES", [-1], True),
    }
    assert inputs().skipped == {"history_surface"}


def test_a_model_that_reads_little_takes_little(inputs: Callable[..., ModelInputs]) -> None:
    little = inputs(LITTLE)
    assert list(little.inputs) == ["history_item", "history_time_ms", "candidate_item", "request_time_ms", "user"]
    assert [name for name, entry in little.inputs.items() if not entry.optional] == ["history_item", "candidate_item"]
    assert little.skipped == {"history_action", "history_surface"}


def test_everything_arrives(inputs: Callable[..., ModelInputs]) -> None:
    found = read(
        inputs(),
        history_action=("BYTES", ["click", "save"]),
        history_dwell_ms=("INT64", [100, 0]),
        history_dwell_ms_present=("BOOL", [True, False]),
        history_note=("BYTES", ["é", ""]),
        candidate_price=("FP64", [1.5, 2.5, 0.0]),
        candidate_price_present=("BOOL", [True, True, False]),
        candidate_brand=("BYTES", ["acme", "b", "c"]),
        candidate_taste=("FP32", [[1, 2], [3, 4], [5, 6]]),
        candidate_taste_present=("BOOL", [True, False, True]),
        candidate_words=("BYTES", ['["a","b"]', "", "[]"]),
        candidate_words_present=("BOOL", [True, False, True]),
        candidate_sold=("BOOL", [True, False, True]),
        candidate_born=("INT64", [1, 2, 3]),
        user_country=("BYTES", ["de"]),
        user_friends=("BYTES", ["[1,2]"]),
        user_age=("INT64", [0]),
        user_age_present=("BOOL", [False]),
        context_device=("BYTES", ["phone"]),
    )
    assert (found.user_id, found.request_ms) == (5, 1000)
    assert found.candidate_items.tolist() == [7, 8, 9]
    history = {name: column.to_pylist() for name, column in found.history.items()}
    assert history == {
        "item": [3, 4],
        "time": [10, 20],
        "action": ["click", "save"],
        "dwell_ms": [100, None],
        "note": ["é", ""],
    }
    values = {entity: {n: c.to_pylist() for n, c in columns.items()} for entity, columns in found.attributes.items()}
    assert values == {
        "item": {
            "price": [1.5, 2.5, None],
            "brand": [string_id("acme"), string_id("b"), string_id("c")],
            "taste": [[1.0, 2.0], None, [5.0, 6.0]],
            "words": [["a", "b"], None, []],
            "sold": [True, False, True],
            "born": [1, 2, 3],
        },
        "user": {"country": ["de"], "friends": [[1, 2]], "age": [None]},
        "context": {"device": ["phone"]},
    }
    assert found.attributes["item"]["price"].values.dtype == np.float64
    assert found.attributes["item"]["taste"].values.dtype == np.float32


def test_other_datatypes_that_hold_the_same(inputs: Callable[..., ModelInputs]) -> None:
    found = read(
        inputs(),
        candidate_price=("FP32", [1.5, 2.5, 3.5]),
        candidate_taste=("FP64", [[1, 2], [3, 4], [5, 6]]),
        candidate_brand=("INT64", [1, 2, 3]),
        user=("BYTES", ["someone"]),
    )
    assert found.user_id == string_id("someone")
    assert found.attributes["item"]["price"].values.dtype == np.float64
    assert found.attributes["item"]["price"].to_pylist() == [1.5, 2.5, 3.5]
    assert found.attributes["item"]["taste"].values.dtype == np.float32


def test_string_ids(inputs: Callable[..., ModelInputs]) -> None:
    model = inputs(id_type="string")
    assert {model.inputs[name].datatypes[0] for name in ("history_item", "candidate_item", "user")} == {"BYTES"}
    found = read(model, history_item=("BYTES", ["a", "b"]), candidate_item=("BYTES", ["c"]), user=("INT64", [5]))
    assert found.history["item"].to_pylist() == [string_id("a"), string_id("b")]
    assert found.user_id == 5


SECRET = 987_654_321_987_654


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"history_itm": ("INT64", [SECRET])}, "there is no input 'history_itm'; allowed: history_item, "),
        ({"history_surface": ("BYTES", ["a", "b"])}, "there is no input 'history_surface'"),
        ({"candidate_price": ("BYTES", ["1"] * 3)}, "candidate_price is BYTES; this model takes FP64 or FP32"),
        ({"candidate_price": ("FP64", [1.0])}, "candidate_price has 1 values; allowed: 3"),
        ({"candidate_price": ("FP64", [[1.0], [2.0], [3.0]])}, "2 dimensions; this model takes one"),
        ({"candidate_price": ("FP64", [1.0, -2.0, 3.0])}, "candidate_price"),
        ({"candidate_taste": ("FP32", [1, 2, 3])}, r"candidate_taste has shape \[3\]; this model takes \[-1, 2\]"),
        ({"candidate_taste": ("FP32", [[1, 2, 3]] * 3)}, r"shape \[3, 3\]"),
        ({"candidate_words": ("BYTES", ["[1", "[]", "[]"])}, "value 0 of input candidate_words is not a JSON list"),
        ({"candidate_words": ("BYTES", ["[]", '{"a":1}', "[]"])}, "value 1 of input candidate_words is not a JSON"),
        ({"candidate_words": ("BYTES", ["[]", "[]", f"[{SECRET}]"])}, "candidate_words 2"),
        ({"candidate_words": ("BYTES", ["[null]", "[]", "[]"])}, "candidate_words 0"),
        ({"user_friends": ("BYTES", ["[1.5]"])}, "user_friends 0"),
        ({"user_country": ("BYTES", ["de", "fr"])}, "user_country has 2 values; allowed: 1"),
        ({"user_age_present": ("BOOL", [True])}, "user_age_present is given without input user_age"),
        (
            {"user_age": ("INT64", [1]), "user_age_present": ("BOOL", [True, True])},
            "user_age_present has 2 values; user_age has 1",
        ),
        ({"user_age_present": ("INT64", [1])}, "user_age_present is INT64; this model takes BOOL"),
        ({"history_dwell_ms": ("INT64", [1])}, "history dwell_ms has 1 values"),
        ({"user": ("INT64", [SECRET, SECRET])}, "user has 2 values; this model takes one"),
        ({"user": ("BYTES", [""])}, "user is an empty string"),
        ({"request_time_ms": ("INT64", [])}, "request_time_ms has 0 values; this model takes one"),
        ({"request_time_ms": ("FP64", [1.0])}, "request_time_ms is FP64; this model takes INT64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_tensors_are_told_by_name_and_without_ids(
    inputs: Callable[..., ModelInputs], given: dict[str, Any], part: str
) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        read(inputs(), **given)
    assert caught.value.status == 400
    assert str(SECRET) not in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["user", "request_time_ms", "history_time_ms", "history_item", "candidate_item"])
def test_what_the_features_need_must_be_there(inputs: Callable[..., ModelInputs], name: str) -> None:
    given = tensors()
    del given[name]
    with pytest.raises(RequestError, match=name.removeprefix("history_")) as caught:
        checked(inputs(), given)
    assert caught.value.status == 400


def test_an_attribute_may_be_named_like_a_mask(inputs: Callable[..., ModelInputs]) -> None:
    odd = Item(price=Float(), price_present=Bool())
    history = sequence(item=events.newest(8).collect(events.item))
    model = inputs(FeatureSet("odd", history=history, a=odd.price, b=odd.price_present))
    found = read(model, candidate_price=("FP64", [1, 2, 3]), candidate_price_present=("BOOL", [True, False, True]))
    assert found.attributes["item"]["price"].to_pylist() == [1.0, 2.0, 3.0]
    assert found.attributes["item"]["price_present"].to_pylist() == [True, False, True]
    alone = read(model, candidate_price_present=("BOOL", [True, False, True]))
    assert alone.attributes["item"]["price"].to_pylist() == [None] * 3


@pytest.mark.parametrize("binary", [False, True])
def test_our_own_client_sends_all_of_it(start_server: Callable[..., Any], scripted_scorer: Any, binary: bool) -> None:
    running = start_server(scripted_scorer(features=EVERYTHING))
    ScoringClient(f"http://127.0.0.1:{running.port}").score(
        {"item": [3, 4], "action": ["click", "x"], "time_ms": [20, 10], "dwell_ms": [1, None], "note": [None, "n"]},
        [7, 8],
        binary=binary,
        request_ms=1000,
        user="someone",
        attributes={
            "candidate_price": [None, 2],
            "candidate_taste": [None, [1, 2]],
            "candidate_words": [["a"], None],
            "candidate_sold": [None, True],
            "user_country": [None],
            "user_age": [30],
            "context_device": ["phone"],
        },
    )
    (seen,) = running.scorer.seen
    assert seen.user_id == string_id("someone")
    assert seen.history["dwell_ms"].to_pylist() == [None, 1]
    assert seen.history["note"].to_pylist() == ["n", None]
    assert {name: column.to_pylist() for name, column in seen.attributes["item"].items()} == {
        "price": [None, 2.0],
        "brand": [None, None],
        "taste": [None, [1.0, 2.0]],
        "words": [["a"], None],
        "sold": [None, True],
        "born": [None, None],
    }
    assert seen.attributes["user"]["age"].to_pylist() == [30]
    assert seen.attributes["user"]["country"].to_pylist() == [None]


def test_what_the_set_declares_and_the_model_does_not_read_is_skipped(inputs: Callable[..., ModelInputs]) -> None:
    model = inputs(EVERYTHING.reading(["history.item", "age"]))
    assert {"history_dwell_ms", "candidate_price", "candidate_price_present", "user_country"} <= model.skipped
    assert not model.skipped & set(model.inputs)
    with pytest.raises(RequestError, match="there is no input 'candidate_prize'") as caught:
        read(model, candidate_prize=("FP64", [1.0]))
    assert "_present" not in caught.value.message  # masks would double the list of what is allowed


@pytest.mark.parametrize(("user_type", "datatypes"), [("string", ("BYTES",)), ("int64", ("INT64",))])
def test_users_have_a_type_of_their_own(scripted_scorer: Any, user_type: Any, datatypes: tuple[str, ...]) -> None:
    scorer = scripted_scorer(features=LITTLE, id_type="string" if user_type == "int64" else "int64")
    signature = dataclasses.replace(scorer.signature, user_type=user_type)
    assert ModelInputs(RequestReader(signature, LITTLE), max_candidates=10).inputs["user"].datatypes == datatypes
