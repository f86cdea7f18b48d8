"""Requests: every way to be wrong has a sentence that names the field and never the id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tackboard.bundle.signature import Signature
from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id
from tackboard.core.vocabulary import DEFAULT_READS, Vocabulary
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
)
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import features_for_model, standard_features
from tackboard.scoring.request import RequestReader, ScoreRequest

events, user, item, request, context = (
    Events(dwell_ms=Int(minimum=0), query=String()),
    User(country=String(), born=Time(), score=Float(minimum=-1, maximum=1), liked=List(Id), is_new=Bool(default=True)),
    Item(price=Float(), embedding=Vector(2)),
    Request(),
    Context(device=String(), tags=List(String)),
)
VOCABULARY = Vocabulary(actions=("click", "save"), surfaces=("home",))
EVERYTHING = FeatureSet(
    "everything",
    hour=request.time.hour("UTC"),
    dwell=events.sum(events.dwell_ms.fill_missing(0)),
    queries=events.distinct(events.query.fill_missing("")),
    country=user.country.fill_missing("").hash_id(),
    age=request.time.seconds_since(user.born).fill_missing(0.0),
    score=user.score.fill_missing(0.0),
    liked=user.liked.fill_missing([]).has(item.id),
    is_new=user.is_new,
    price=item.price.fill_missing(0.0),
    embedding=item.embedding.fill_missing(0.0),
    device=context.device.fill_missing("").hash_id(),
    tags=context.tags.fill_missing([]).length(),
)


def signature_of(id_type: Any = "int64") -> Signature:
    return Signature(
        format_version=2,
        name="m",
        version="1",
        id_type=id_type,
        actions=VOCABULARY.actions,
        surfaces=VOCABULARY.surfaces,
        max_history=3,
        model={},
        tables={},
        lineage={},
    )


def reader_of(id_type: Any = "int64", reads: Sequence[str] = DEFAULT_READS) -> RequestReader:
    """The reader of a model that reads some of the standard columns of the newest three events."""
    return RequestReader(signature_of(id_type), features_for_model(reads, VOCABULARY, 3))


@pytest.fixture(scope="module")
def wide() -> RequestReader:
    """The reader of a model that reads everything a request can hold."""
    return RequestReader(signature_of(), EVERYTHING.merged(standard_features(VOCABULARY, 3)))


def history_of(request: ScoreRequest) -> dict[str, list[Any]]:
    return {name: column.to_pylist() for name, column in request.history.items()}


def test_names_become_the_indices_of_training() -> None:
    """`tv` was never seen in training: 0."""
    reader = reader_of()
    request = reader.read(
        {"item": [5, 6], "action": ["save", "click"], "surface": ["home", "tv"], "time_ms": [100, 200]}, [7]
    )
    history = OnlineExecutor(reader.features.plan).compute(history=request.history)["history"].to_pylist()[0]
    assert history == {"item": [5, 6], "action": [2, 1], "surface": [1, 0], "time": [100, 200]}


def test_events_are_sorted_by_time_with_ties_as_given_and_all_columns_together() -> None:
    history: dict[str, list[Any]] = {
        "item": [1, 2, 3],
        "action": ["click", "save", "new"],
        "surface": ["home", "", "home"],
        "time_ms": [50, 10, 10],
    }
    assert history_of(reader_of().read(history, [1])) == {
        "item": [2, 3, 1],
        "time": [10, 10, 50],
        "action": ["save", "new", "click"],
        "surface": ["unknown", "home", "home"],  # as the importer names an empty one
    }


def test_the_newest_events_are_kept_after_sorting() -> None:
    timed = reader_of().read({"item": [1, 2, 3, 4, 5], "time_ms": [9, 1, 8, 2, 7]}, [1])
    assert history_of(timed)["item"] == [5, 3, 1]
    untimed = history_of(reader_of().read({"item": [1, 2, 3, 4, 5]}, [1]))
    assert untimed == {"item": [3, 4, 5], "time": [0, 0, 0], "action": ["event"] * 3, "surface": ["default"] * 3}


def test_a_feature_that_counts_all_events_gets_them_all(wide: RequestReader) -> None:
    found = wide.read({"item": [1, 2, 3, 4, 5]}, [1], request_ms=0)
    assert history_of(found)["item"] == [1, 2, 3, 4, 5]


def test_what_training_never_saw_is_counted_among_the_newest_events() -> None:
    history: dict[str, list[Any]] = {
        "item": [1, 2, 3, 4],
        "action": ["x", "click", "x", "save"],
        "surface": ["home"] * 4,
    }
    assert reader_of().read(history | {"time_ms": [1, 2, 3, 4]}, [1]).num_unknown == {"action": 1}
    assert reader_of().read(history, [1]).num_unknown == {"action": 1, "time_ms": 3}
    assert reader_of().read({"item": [1]}, [1]).num_unknown == {"action": 1, "surface": 1, "time_ms": 1}
    assert reader_of(reads=("history.item",)).read({"item": [1]}, [1]).num_unknown == {}, "nothing else is read"
    assert reader_of().read({}, [1]).num_unknown == {}


def test_what_is_left_out_is_known_where_training_left_it_out() -> None:
    names = {"actions": ("event", "unknown"), "surfaces": ("default",)}
    signature = dataclasses.replace(signature_of(), **names)
    reader = RequestReader(signature, features_for_model(DEFAULT_READS, Vocabulary.from_dict(names), 3))
    request = reader.read({"item": [5, 6], "time_ms": [1, 2]}, [7])
    assert request.num_unknown == {}
    history = OnlineExecutor(reader.features.plan).compute(history=request.history)["history"].to_pylist()[0]
    assert (history["action"], history["surface"]) == ([1, 1], [1, 1])
    empty = reader.read({"item": [5, 6], "action": ["", "event"], "time_ms": [1, 2]}, [7])
    assert empty.num_unknown == {} and history_of(empty)["action"] == ["unknown", "event"]


def test_strings_are_hashed_where_training_had_strings() -> None:
    request = reader_of("string").read({"item": ["a"]}, ["b", "\u00e9"])
    assert history_of(request)["item"] == [string_id("a")]
    assert request.candidate_items.tolist() == [string_id("b"), string_id("\u00e9")]


def test_arrays_of_the_wire_are_taken_as_they_are() -> None:
    wide: Any = {"item": np.array([4, 9]), "time_ms": np.array([2, 1])}
    assert history_of(reader_of().read(wide, [7]))["item"] == [9, 4]
    other: dict[str, Any] = {"item": np.array([4], dtype=np.int32)}
    candidates: Any = np.array([7], dtype=np.uint64)
    narrow = reader_of().read(other, candidates)
    assert narrow.candidate_items.dtype == narrow.history["item"].values.dtype == np.int64
    assert narrow.candidate_items.tolist() == [7]


def test_a_column_that_the_model_does_not_read_is_passed_over() -> None:
    """Before it is converted: not even its type is looked at."""
    request = reader_of(reads=["history.item"]).read({"item": [5], "action": [None], "surface": [3]}, [7])
    assert set(request.history) == {"item", "time"}


@pytest.mark.parametrize(
    ("history", "candidates", "expected"),
    [
        ({"items": [1]}, [1], "history has the unknown field 'items'"),
        ({"item": [1, 2], "action": ["click"]}, [1], "2 items and 1 values of action"),
        ({"item": [], "surface": ["home"]}, [1], "0 items and 1 values of surface"),
        ({"item": [1], "time_ms": []}, [1], "1 items and 0 values of time_ms"),
        ({"item": [1], "action": [3]}, [1], "history action 0 is a number"),
        ({"item": [1], "surface": [None]}, [1], "history surface 0 is missing"),
        ({"item": [1], "time_ms": ["now"]}, [1], "history time_ms 0 is a string"),
        ({"item": [1], "time_ms": [1.5]}, [1], "history time_ms 0 is a fraction"),
        ({"item": [1], "time_ms": [2**63]}, [1], "history time_ms 0 is out of range"),
        ({"item": ["secret"]}, [1], "history item 0 is a string"),
        ({"item": [1, True]}, [1], "history item 1 is a boolean"),
        ({"item": [2**63]}, [1], "history item 0 is out of range"),
        ({}, [1.0], "candidate 0 is a fraction"),
        ({}, [1, None], "candidate 1 is missing"),
        ({}, [], "candidates is empty"),
    ],
)
def test_every_error_names_its_field(history: dict[str, Any], candidates: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        reader_of().read(history, candidates)
    assert len(str(caught.value).splitlines()) <= 3
    assert "secret" not in str(caught.value)


def test_an_attribute_with_a_typo_gets_a_suggestion_another_is_left_out(wide: RequestReader) -> None:
    for name, fix in (("user_contry", "did you mean 'user_country'?"), ("zzz", "leave the attribute out")):
        with pytest.raises(UsageError, match="the unknown attribute") as caught:
            wide.read({}, [1], request_ms=5, attributes={name: ["x"]})
        assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("history", "candidates", "expected"),
    [
        ({"item": [5]}, ["a"], "history item 0 is a number"),
        ({"item": [""]}, ["a"], "history item 0 is an empty string"),
        ({}, [None], "candidate 0 is missing"),
    ],
)
def test_string_models_take_strings_only(history: dict[str, Any], candidates: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        reader_of("string").read(history, candidates)


def test_attributes_and_fields_become_columns(wide: RequestReader) -> None:
    found = wide.read(
        {"item": [1, 2], "time_ms": [20, 10], "dwell_ms": [None, 5], "query": ["é", None]},
        [7, 8],
        request_ms=99,
        user="anna",
        attributes={
            "user_country": ["de"],
            "user_born": [-5],
            "user_score": [1],
            "user_liked": [[7, "b"]],
            "user_is_new": [False],
            "candidate_price": [1.5, None],
            "candidate_embedding": [[1, 2.5], None],
            "context_device": ["tv"],
            "context_tags": [["a", "b"]],
        },
    )
    assert history_of(found) == {
        "item": [2, 1],
        "time": [10, 20],
        "action": ["event", "event"],
        "surface": ["default", "default"],
        "dwell_ms": [5, None],
        "query": [None, "é"],
    }
    assert (found.request_ms, found.user_id) == (99, string_id("anna"))
    plain = {entity: {name: c.to_pylist() for name, c in group.items()} for entity, group in found.attributes.items()}
    assert plain == {
        "user": {"country": ["de"], "born": [-5], "score": [1.0], "liked": [[7, string_id("b")]], "is_new": [False]},
        "item": {"price": [1.5, None], "embedding": [[1.0, 2.5], None]},
        "context": {"device": ["tv"], "tags": [["a", "b"]]},
    }


def test_what_is_not_given_is_missing_and_a_declared_default_stands_in(wide: RequestReader) -> None:
    found = wide.read({"item": [1]}, [7, 8], request_ms=0)
    columns = {(entity, name): c for entity, group in found.attributes.items() for name, c in group.items()}
    assert {key: column.to_pylist() for key, column in columns.items()} == {
        key: [None] * (2 if key[0] == "item" else 1) for key in columns
    }
    assert history_of(found)["dwell_ms"] == [None]
    values = OnlineExecutor(wide.features.plan).compute(
        history=found.history, request_ms=0, item_ids=found.candidate_items, **found.attributes
    )
    plain = {name: column.to_pylist() for name, column in values.items()}
    assert plain["is_new"] == [True]
    assert plain["score"] == [0.0]
    assert plain["price"] == [0.0, 0.0]
    assert plain["liked"] == [False, False]


def test_arrays_of_attributes_are_taken_as_they_are(wide: RequestReader) -> None:
    prices: Any = np.array([1.5, -0.0], dtype=np.float32)
    vectors: Any = np.array([[1, 2], [3, 4]], dtype=np.float32)
    more = {"candidate_price": prices, "candidate_embedding": vectors, "user_score": np.array([0.25])}
    found = wide.read({}, [7, 8], request_ms=0, attributes=more).attributes
    assert found["item"]["price"].to_pylist() == [1.5, -0.0]
    assert found["item"]["price"].values.dtype == np.float64
    assert found["item"]["embedding"].to_pylist() == [[1, 2], [3, 4]]
    assert found["user"]["score"].to_pylist() == [0.25]


SECRET = 918273645


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"request_ms": None}, "request_time_ms is missing"),
        ({"request_ms": "now"}, "request_time_ms is a string"),
        ({"request_ms": 1.5}, "request_time_ms is a fraction"),
        ({"request_ms": True}, "request_time_ms is a boolean"),
        ({"request_ms": 2**63}, "request_time_ms is out of range"),
        ({"user": 1.5}, "user is a fraction"),
        ({"user": ""}, "user is an empty string"),
        ({"user": SECRET << 64}, "user is out of range"),
        ({"user": [SECRET]}, "user is list"),
        ({"attributes": {"user_contry": ["x"]}}, "the request has the unknown attribute 'user_contry'"),
        ({"attributes": {"country": ["x"]}}, "the request has the unknown attribute 'country'"),
        ({"attributes": {"user_country": []}}, "user_country has 0 values"),
        ({"attributes": {"user_country": ["de", "fr"]}}, "user_country has 2 values"),
        ({"attributes": {"candidate_price": [1.0]}}, "candidate_price has 1 values"),
        ({"attributes": {"user_country": [SECRET]}}, "user_country 0 is a number"),
        ({"attributes": {"user_born": [1.5]}}, "user_born 0 is a fraction"),
        ({"attributes": {"user_born": ["1990"]}}, "user_born 0 is a string"),
        ({"attributes": {"user_score": ["high"]}}, "user_score 0 is a string"),
        ({"attributes": {"user_score": [True]}}, "user_score 0 is a boolean"),
        ({"attributes": {"user_score": [SECRET**99]}}, "user_score 0 is a number"),
        ({"attributes": {"user_score": [SECRET]}}, "user_score is out of range"),
        ({"attributes": {"user_score": [-1.5]}}, "user_score is out of range"),
        ({"attributes": {"user_is_new": [1]}}, "user_is_new 0 is a number"),
        ({"attributes": {"user_liked": [SECRET]}}, "user_liked 0 is a number"),
        ({"attributes": {"user_liked": [[SECRET, None]]}}, "user_liked 0 is list"),
        ({"attributes": {"user_liked": [[1.5]]}}, "user_liked 0 is a fraction"),
        ({"attributes": {"candidate_price": [1.0, "x"]}}, "candidate_price 1 is a string"),
        ({"attributes": {"candidate_embedding": [None, [1.0]]}}, "candidate_embedding 1 is list"),
        ({"attributes": {"candidate_embedding": [None, [1.0, "x"]]}}, "candidate_embedding 1 is a string"),
        ({"attributes": {"context_tags": [["a", 3]]}}, "context_tags 0 is a number"),
        ({"history": {"item": [SECRET], "dwell_ms": [1, 2]}}, "history dwell_ms has 2 values"),
        ({"history": {"item": [SECRET], "dwell_ms": [1.5]}}, "history dwell_ms 0 is a fraction"),
        ({"history": {"item": [SECRET, 2], "dwell_ms": [1, -2]}}, "history dwell_ms is out of range"),
        ({"history": {"item": [SECRET], "query": [7]}}, "history query 0 is a number"),
        ({"history": {"item": [SECRET], "dwel_ms": [7]}}, "history has the unknown field 'dwel_ms'"),
    ],
)
def test_every_error_of_the_wider_request_names_its_field(
    wide: RequestReader, changes: dict[str, Any], expected: str
) -> None:
    given: dict[str, Any] = {"history": {"item": [SECRET]}, "request_ms": 5} | changes
    with pytest.raises(UsageError) as caught:
        wide.read(given.pop("history"), [SECRET, 7], **given)
    assert expected in caught.value.got
    assert caught.value.allowed
    assert len(str(caught.value).splitlines()) <= 3
    assert str(SECRET) not in str(caught.value)


def test_a_model_that_reads_the_users_id_is_not_given_another() -> None:
    features = FeatureSet("own", group=user.id.bucket_hash(100)).merged(standard_features(VOCABULARY, 3))
    reader = RequestReader(signature_of(), features)
    assert reader.needs_user
    assert reader.read({}, [1], user=7).user_id == 7
    with pytest.raises(UsageError, match="user is missing") as caught:
        reader.read({}, [1])
    assert caught.value.allowed == "this model reads the user's id"
    assert caught.value.fix == "send `user`, the id of this user in the log"


def test_how_old_events_are_needs_their_times() -> None:
    features = FeatureSet("own", n=events.within(milliseconds(1000)).count()).merged(standard_features(VOCABULARY, 3))
    reader = RequestReader(signature_of(), features)
    with pytest.raises(UsageError, match="history lacks time_ms") as caught:
        reader.read({"item": [1]}, [1], request_ms=5)
    assert "the time of every event in ms" in caught.value.fix
    with pytest.raises(UsageError, match="request_time_ms is missing") as caught:
        reader.read({"item": [1], "time_ms": [1]}, [1])
    assert "send request_time_ms" in caught.value.fix
    assert len(reader.read({}, [1], request_ms=5).history["item"]) == 0


@pytest.mark.parametrize(("user_type", "right", "wrong"), [("int64", 7, "7"), ("string", "bob", 7)])
def test_users_are_named_as_in_training(user_type: Any, right: Any, wrong: Any) -> None:
    """A number sent as text would be hashed into somebody else."""
    signature = dataclasses.replace(signature_of(), user_type=user_type)
    reader = RequestReader(signature, standard_features(VOCABULARY, 3))
    assert reader.read({}, [1], user=right).user_id == (right if user_type == "int64" else string_id(right))
    with pytest.raises(UsageError, match="user is a ") as caught:
        reader.read({}, [1], user=wrong)
    assert str(wrong) not in str(caught.value).replace("64 bits", "")


def test_what_the_set_declares_and_the_model_does_not_read_is_passed_over() -> None:
    """Training with one feature fewer must not break clients."""
    narrow = EVERYTHING.merged(standard_features(VOCABULARY, 3)).reading(["history.item", "score"])
    reader = RequestReader(signature_of(), FeatureSet.from_json(narrow.to_json()))
    assert {"history_dwell_ms", "history_action", "user_country", "candidate_price", "context_device"} <= reader.skipped
    assert not reader.skipped & {"user_score", "history_item", "history_time", "user_id"}
    history = {"item": [1], "dwell_ms": ["not even a number"], "action": ["click"]}
    given = {"user_score": [0.5], "user_country": ["de"], "candidate_price": [1.0]}
    request_ = reader.read(history, [1], attributes=given)
    assert set(request_.history) == {"item", "time"}
    assert set(request_.attributes["user"]) == {"score"}
    with pytest.raises(UsageError, match="the unknown attribute 'user_contry'"):
        reader.read({}, [1], attributes={"user_contry": ["de"]})
